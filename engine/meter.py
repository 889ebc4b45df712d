"""Counts an engine's steps, tokens and seconds."""

from engine.protocol import Stats
from engine.runner import Runner


class Meter:
    """In total, and since the last `stats`."""

    def __init__(self, waited: float) -> None:
        """waited: the seconds for which this rank has waited for all-reduces so far."""
        self.prompt_tokens = self.generation_tokens = self.steps = 0
        self.token_seconds: float | None = None  # see `Stats`
        self._seconds, self._waited = 0.0, waited
        self._batch_tokens: list[int] = []

    def count(self, batch_tokens: int, generated: int, seconds: float) -> None:
        """Count a step that computed `batch_tokens` tokens and generated some."""
        self.steps += 1
        self.generation_tokens += generated
        self._seconds += seconds
        self._batch_tokens.append(batch_tokens)
        self.token_seconds = min(seconds / max(1, batch_tokens), self.token_seconds or seconds)

    def stats(self, runner: Runner) -> Stats:
        """The counts. runner: of the steps."""
        steps, seconds, batch_tokens = len(self._batch_tokens), self._seconds, self._batch_tokens
        self._seconds, self._batch_tokens = 0.0, []
        return Stats(
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            step_seconds=seconds / steps if steps else 0.0,
            batch_tokens=batch_tokens,
            all_reduce_share=self._all_reduce_share(runner, seconds),
            idle_share=self._idle_share(runner, seconds),
            token_seconds=self.token_seconds,
        )

    def _all_reduce_share(self, runner: Runner, seconds: float) -> float | None:
        """The share of `seconds`, the time of the steps since the last call, that this rank waited for all-reduces."""
        waited = runner.model.comm.waited
        if waited is None:
            return None
        since, self._waited = waited - self._waited, waited
        return min(1.0, since / seconds) if seconds else None

    @staticmethod
    def _idle_share(runner: Runner, seconds: float) -> float | None:
        """The share of `seconds` for which the device waited for the next step."""
        if runner.graphs is None:
            return None
        idle, runner.idle_seconds = runner.idle_seconds, 0.0
        return min(1.0, idle / seconds) if seconds else None

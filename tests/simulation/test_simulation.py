"""Some lives of the server from a new seed, and that the simulation notices faults."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.core import Engine
from engine.scheduler import Scheduler, WaitingQueue
from engine.sequence import BlockManager, Sequence
from server import recovery
from server.engine_client import OutputQueue
from server.journal_file import JournalFile
from server.recovery import REFUSED, Recovery
from tests.simulation.life import live

FAILED = (3, 1001, 1065547853)  # seeds of lives that failed once
TELLING = (3, 9, 35, 21, 6, 43)  # seeds that show the rarest of FAULTS soon; others do later


def test_lives_repeat_exactly(seed: int) -> None:
    total = sum(map(live, FAILED), Counter[str]())
    for i in range(4):
        total += live(seed + i, steps=1000)
    assert total["finished"] > 50, total
    assert live(seed, steps=300) == live(seed, steps=300)


def share_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks are found before anything is computed in them."""

    def admit(self: Scheduler, sequence: Sequence, reserved: int = 0) -> bool:
        found: bool = original(self, sequence, reserved)
        if found:
            sequence.computed, before = len(sequence.tokens) - 1, sequence.computed
            self._publish(sequence)
            sequence.computed = before
        return found

    return admit


def keep_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrong tokens of drafts count as computed."""
    return lambda self, sequence, count: setattr(sequence, "unknown", sequence.unknown - count)


def keep_a_forbidden_token(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is in flight behind a forbidden token still counts."""
    return lambda self, sequence: setattr(sequence, "computed", len(sequence.tokens))


def share_adapters(original: Any) -> Any:
    """The blocks of one adapter are found for another."""
    return property(lambda self: -1)


def lose_an_abort(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, request_id: None


def start_the_newest(original: Callable[..., Any]) -> Callable[..., Any]:
    """A client's requests start in the wrong order."""

    def add(self: WaitingQueue, sequence: Sequence) -> None:
        self.add_again(sequence)

    return add


def forget_a_block(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, blocks: original(self, blocks[1:])


def repeat_a_token(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Engine) -> list[Any]:
        outputs: list[Any] = original(self)
        return outputs + [o for o in outputs if not o.finish_reason][:1]

    return step


def promise_without_writing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, row: True


def forget_a_result(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number, status, result: True


def lose_a_result(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number, status, result: self.forget(number)


def forget_who_waits(original: Callable[..., Any]) -> Callable[..., Any]:
    """A suspect that goes on is still computed alone."""
    return lambda self, request: setattr(request, "stuck", 0)


def compute_after_an_error(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, error: setattr(self, "_error", error)


def believe_the_dead(original: Callable[..., Any]) -> Callable[..., Any]:
    """What ended ranks said when they started counts, however late it comes."""

    def on_starting(self: Recovery, pid: int) -> None:
        self.on_end()
        self._watch_process(pid, -1)

    return on_starting


def go_on_without_a_frontend(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: None


def refuse_the_innocent(original: Callable[..., Any]) -> Callable[..., Any]:
    """All that were there at the ranks' last ends are refused, not the one alone."""
    return lambda self, request: request.stuck >= REFUSED


def believe_a_token(original: int) -> int:
    """A request with a token is as good as any other."""
    return 1


FAULTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (Scheduler, "_admit", share_blocks),
    (Scheduler, "reject", keep_drafts),
    (Scheduler, "draw_again", keep_a_forbidden_token),
    (Sequence, "root", share_adapters),
    (Scheduler, "abort", lose_an_abort),
    (WaitingQueue, "add", start_the_newest),
    (BlockManager, "release", forget_a_block),
    (Engine, "step", repeat_a_token),
    (OutputQueue, "on_error", compute_after_an_error),
    (Recovery, "went_on", forget_who_waits),
    (Recovery, "_must_be_refused", refuse_the_innocent),
    (recovery, "GOT_ON", believe_a_token),
    (Recovery, "on_starting", believe_the_dead),
    (Engine, "abort_all", go_on_without_a_frontend),
    (JournalFile, "add", promise_without_writing),
    (JournalFile, "finish", forget_a_result),
    (JournalFile, "finish", lose_a_result),
]


@pytest.mark.parametrize(("kind", "name", "harm"), FAULTS, ids=[harm.__name__ for *_, harm in FAULTS])
def test_faults_are_noticed(kind: Any, name: str, harm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, name, harm(getattr(kind, name)))
    with pytest.raises(AssertionError, match=r"make simulate SEED=\d+ STEPS=1"):
        [live(seed, steps=400) for seed in (*TELLING, *range(60))]

"""Run a request in the engine, and convert the engine's outputs to the deltas of each choice."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from types import TracebackType
from typing import Any

from engine.protocol import SamplingParams, TokenOutput
from engine.text import AnswerStream, Delta
from server.limits import Limits, check_prompts
from server.params import make_submits
from server.problems import ApiError
from server.service import Service
from tokenizer import Tokenizer


@dataclass
class Prompt:
    ids: list[int]
    text: str | None = None  # the client's text; None if the client sent ids or the prompt was cut


@dataclass
class Plan:
    """What the engine computes for one HTTP request: `choices` sequences for each prompt."""

    prompts: list[Prompt]
    params: list[SamplingParams]  # one for each prompt; choice i samples with seed + i
    choices: int
    hidden: bool = False  # max_tokens 0: the engine computes one token, which is not shown

    @property
    def total(self) -> int:
        return len(self.prompts) * self.choices

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all sequences: a prompt counts once for each of its choices."""
        return sum(len(prompt.ids) for prompt in self.prompts) * self.choices

    def prompt(self, index: int) -> Prompt:
        """The prompt of the sequence at `index`."""
        return self.prompts[index // self.choices]

    def stream(self, tokenizer: Tokenizer, index: int) -> AnswerStream:
        params = self.params[index // self.choices]
        return AnswerStream(index, tokenizer, self.prompt(index).ids, params, self.hidden)


class Usage:
    """Token counts so far. A prompt counts once, regardless of its number of choices."""

    def __init__(self, plan: Plan) -> None:
        self.prompt = sum(len(prompt.ids) for prompt in plan.prompts)
        self.completion = 0
        self._cached: dict[int, int] = {}

    def add(self, prompt: int, output: TokenOutput) -> None:
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.cached_tokens)

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Run:
    """Runs a plan. A context manager, which aborts unfinished sequences at its end.

    `log_fields` collects fields of the access log. Raises ApiError: 400, 429, 503.
    """

    def __init__(self, service: Service, plan: Plan, usage: Usage, log_fields: dict[str, Any]) -> None:
        self.unfinished = plan.total
        self._service, self._plan, self._usage, self._log_fields = service, plan, usage, log_fields

    def __enter__(self) -> "Run":
        service, plan = self._service, self._plan
        service.admit(plan.total)
        check_prompts(plan.prompt_tokens, Limits(service.max_model_len), plan.params[0].prompt_logprobs)
        self._choices = [plan.stream(service.tokenizer, i) for i in range(plan.total)]
        self._log_fields |= {"prompt_tokens": self._usage.prompt, "completion_tokens": 0}
        self._started = time.monotonic()
        self._outputs = service.client.generate(make_submits([one.ids for one in plan.prompts], plan.params, plan.choices))
        self._outputs.__enter__()
        # One timer for the whole request: a timeout around each wait would need a timer for every token.
        seconds = service.settings.request_timeout
        error = ApiError(503, f"the request took longer than {seconds:g} s and was ended", None, "timeout")
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._outputs.on_error, error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._deadline.cancel()
        self._outputs.__exit__(kind, error, trace)

    async def next(self) -> Iterator[Delta]:
        """Wait for outputs and return an iterator over their deltas, perhaps an empty one.

        The caller must exhaust the iterator. It processes each output only when the caller gets to it. So the usage includes
        exactly the deltas up to the current one, and an output that fails does not discard the deltas before it.
        """
        arrived = await self._outputs.next()
        return filter(None, starmap(self._take, arrived))

    def _take(self, index: int, output: TokenOutput) -> Delta | None:
        choice, usage = self._choices[index], self._usage
        if choice.finished:  # the output is from after a stop string
            return None
        if output.cached_tokens:
            usage.add(index // self._plan.choices, output)
        if (delta := choice.push(output)) is None:
            return None
        usage.completion += len(delta.token_ids)
        self._log_fields["completion_tokens"] = usage.completion
        if "ttft" not in self._log_fields:
            self._log_fields["ttft"] = round(time.monotonic() - self._started, 4)
        if delta.finish_reason:
            self.unfinished -= 1
            self._log_fields["finish"] = delta.finish_reason
            self._outputs.stop(index)
        return delta

"""What the engine computes for a request, and its outputs as the deltas of each choice."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

from engine.protocol import SamplingParams, Submit, TokenOutput, Turn
from engine.text import AnswerStream, Delta, banned_by
from server.bounds import TokenBounds, check_ids, check_prompts
from server.engine_client import OutputQueue
from server.errors import NO_RETRY, ApiError, bad
from server.schemas import SAMPLED, GenerationBody
from server.service import Service
from text.tokenizer import Tokenizer

SMALLEST_TOP_P = 1e-9  # replaces top_p 0; keeps only the likeliest token
TEXT_FORMS = {"bad_words", "ignore_eos", "thinking_token_budget"}  # become `banned`, `stop_token_ids` and `thinking`


@dataclass
class Prompt:
    ids: list[int]
    text: str | None = None  # the client's text; None if the client sent ids or the prompt was cut
    prediction: list[int] = field(default_factory=list)  # ids of a text that the answer may repeat


@dataclass
class Plan:
    """What the engine computes for one HTTP request: `choices` sequences for each prompt."""

    prompts: list[Prompt]
    params: list[SamplingParams]  # one for each prompt, of equal seeds; the sequence at index i draws with seed + i
    choices: int
    turn: Turn = field(default_factory=Turn)
    adapter: str = ""  # its name; empty: none
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

    def submits(self) -> list[Submit]:
        unique = uuid.uuid4().hex  # clients may use a request id of their own more than once
        submits = list[Submit]()
        for prompt, params in zip(self.prompts, self.params, strict=True):
            for _ in range(self.choices):
                index = len(submits)
                own = params.of_answer(index)
                submits.append(Submit(f"{unique}-{index}", prompt.ids, own, turn=self.turn, adapter=self.adapter))
        return submits


def make_params(
    body: GenerationBody,
    tokenizer: Tokenizer,
    vocab_size: int,
    max_tokens: Sequence[int],
    grammar: str | None,
    prediction: list[int],
    kept_special: list[int],
    defaults: dict[str, Any] | None = None,
) -> list[SamplingParams]:
    """The engine's parameters for each prompt. They differ in `max_tokens` and `min_tokens` only. defaults: what replaces the engine's.

    `max_tokens`: the limit of each prompt's answers. `kept_special`: special tokens that are text in any case.
    Raises a 400 for an unknown token id, and if `min_tokens` excludes all allowed ones.
    """
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
    check_ids(list(bias), vocab_size, "logit_bias")
    check_ids(body.allowed_token_ids or [], vocab_size, "allowed_token_ids")
    check_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids")
    stop_ids = {*(body.stop_token_ids or []), *(() if body.ignore_eos else tokenizer.eos_ids)}
    if body.min_tokens and stop_ids.issuperset(body.allowed_token_ids or range(vocab_size)):
        raise bad("min_tokens", "excludes all allowed tokens, because each ends the answer; allow another, or set it to 0")
    asked = (defaults or {}) | {name: value for name in SAMPLED if (value := getattr(body, name)) is not None}
    logprobs, prompt_logprobs = body.engine_logprobs
    asked |= {
        "top_k": max(asked.get("top_k", 0), 0),
        "top_p": max(asked.get("top_p", 1.0), SMALLEST_TOP_P),
        "seed": random.getrandbits(62) if body.seed is None else body.seed,
        "logit_bias": bias,
        "stop_token_ids": sorted(stop_ids),
        "stop": body.stops,
    }
    shared = SamplingParams(
        **{name: value for name, value in asked.items() if name not in TEXT_FORMS},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prediction=prediction,
        grammar=grammar,
        late_grammar=grammar is not None and body.is_mostly_free,
        grammar_optional=grammar is not None and not body.insists,
        banned=banned_by(tokenizer, body.bad_words or []),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        kept_special=kept_special,
    )
    return [shared.changed(max_tokens=max(limit, 1), min_tokens=min(body.min_tokens or 0, limit)) for limit in max_tokens]


class Usage:
    """Token counts so far. A prompt counts once, regardless of its number of choices."""

    def __init__(self, plan: Plan) -> None:
        self.prompt = sum(len(prompt.ids) for prompt in plan.prompts)
        self.completion = self.drafted = self.accepted = 0
        self.reasoning: dict[int, int] = {}  # tokens by choice
        self._cached: dict[int, int] = {}

    def add(self, prompt: int, output: TokenOutput) -> None:
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.cached_tokens)
        self.drafted += output.drafted
        self.accepted += output.accepted

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": sum(self.reasoning.values()),
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }


@contextmanager
def run(service: Service, plan: Plan, usage: Usage, log_fields: dict[str, Any]) -> Iterator["Run"]:
    """Run a plan. At the end of the `with` block, unfinished sequences are aborted.

    `log_fields` collects fields of the access log, and has what the client calls the request. Raises ApiError: 400, 429, 503.
    """
    service.check_ready()
    check_prompts(plan.prompt_tokens, TokenBounds(service.max_model_len), plan.params[0].prompt_logprobs)
    log_fields |= {"prompt_tokens": usage.prompt, "completion_tokens": 0}
    client = service.client
    with (
        service.admission.hold(plan.turn.client, plan.total, client.active) as leave,
        client.generate(plan.submits(), log_fields.get("request_id", "")) as outputs,
    ):
        # One timer for the whole request: a timeout around each wait would need a timer for every token.
        error = timed_out(service)
        deadline = asyncio.get_running_loop().call_later(service.longest(plan.turn), outputs.on_error, error)
        try:
            yield Run(plan, service.tokenizer, outputs, usage, log_fields, leave)
        finally:
            deadline.cancel()


def timed_out(service: Service) -> ApiError:
    """The error of a request that ran its full time, which another try would only spend again."""
    message = f"the request took longer than {service.settings.request_timeout:g} s and was ended"
    return ApiError(503, message, None, "timeout", NO_RETRY)


class Run:
    """A plan that runs. Made by `run`."""

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer,
        outputs: OutputQueue,
        usage: Usage,
        log_fields: dict[str, Any],
        leave: Callable[[], None],
    ) -> None:
        """leave: called when a sequence ends."""
        self.unfinished = plan.total
        self._plan, self._tokenizer, self._outputs, self._usage, self._log_fields = plan, tokenizer, outputs, usage, log_fields
        self._leave = leave
        self._choices: dict[int, AnswerStream] = {}  # each made with its first output: all at once would take long
        self._started = time.monotonic()

    def count_unread(self, count: Callable[[int], None] | None) -> None:
        """Report the bytes of outputs that wait for `next` to `count`, which gets negative numbers for those that do no longer."""
        self._outputs.count_unread = count

    async def next(self) -> Iterator[Delta]:
        """Wait for outputs and return an iterator over their deltas, perhaps an empty one.

        The caller must exhaust the iterator. It processes each output only when the caller gets to it. So the usage includes
        exactly the deltas up to the current one, and an output that fails does not discard the deltas before it.
        """
        arrived = await self._outputs.next()
        return filter(None, starmap(self._take, arrived))

    def _take(self, index: int, output: TokenOutput) -> Delta | None:
        if (choice := self._choices.get(index)) is None:
            choice = self._choices[index] = self._plan.stream(self._tokenizer, index)
        usage = self._usage
        if choice.finished:  # the output is from after a stop string
            return None
        if output.cached_tokens or output.drafted:
            usage.add(index // self._plan.choices, output)
        if (delta := choice.push(output)) is None:
            return None
        usage.completion += len(delta.token_ids)
        self._log_fields["completion_tokens"] = usage.completion
        if "ttft" not in self._log_fields:
            self._log_fields["ttft"] = round(time.monotonic() - self._started, 4)
        if delta.finish_reason:
            self.unfinished -= 1
            self._leave()
            self._log_fields["finish"] = delta.finish_reason
            self._outputs.stop(index, choice.text.token_count)
        return delta

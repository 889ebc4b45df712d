"""What the HTTP frontend and the engine say to each other: two one-way queues of small messages.

The frontend turns text into ids and ids into text; the engine knows ids only. Messages are msgpack over ZeroMQ sockets
(PUSH to PULL, `ipc://`), so the two are separate processes and neither waits for the other.

    frontend -> engine   Submit, SubmitAll, Abort, Shutdown
    engine -> frontend   Ready, Outputs, Refused, Stats, Fatal
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

LIST_LIMIT = 20  # most top-logprobs a request may ask for


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of one token id, and its rank in the distribution (1: the likeliest)."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position: the chosen (or given) token, and the likeliest ones, best first."""

    chosen: Logprob
    top: list[Logprob]


class RequestParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is generated. Already validated; `seed` is always set, so that every rank draws alike."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] = []  # EOS included unless ignored; the token itself is output, then the request ends
    logprobs: int | None = None  # None: no log-probabilities; k: those of the chosen token and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: str | None = None  # a JSON schema or the like in llguidance's grammar format; None: free text


class Submit(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    prompt_ids: list[int]
    params: RequestParams


class Member(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence of a SubmitAll has of its own. `prompt`: its place in `prompts`."""

    request_id: str
    prompt: int
    max_tokens: int
    min_tokens: int
    seed: int


class SubmitAll(msgspec.Struct, frozen=True, tag=True):
    """Many sequences of one HTTP request. What they share is here once: a grammar may have a megabyte, times a thousand answers. They
    run all or none; a `Refused` for the first one is for all."""

    params: RequestParams  # but for what a Member has
    prompts: list[list[int]]
    members: list[Member]

    def submits(self) -> list[Submit]:
        """Of each member, with lists and texts in common."""
        replace = msgspec.structs.replace
        return [
            Submit(
                one.request_id,
                self.prompts[one.prompt],
                replace(self.params, max_tokens=one.max_tokens, min_tokens=one.min_tokens, seed=one.seed),
            )
            for one in self.members
        ]


def joined(submits: Sequence[Submit]) -> SubmitAll:
    """As one message. Their params may differ in what a Member has; equal prompts are recognized where they are the same object."""
    places: dict[int, int] = {}
    prompts: list[list[int]] = []
    members: list[Member] = []
    for submit in submits:
        place = places.setdefault(id(submit.prompt_ids), len(prompts))
        if place == len(prompts):
            prompts.append(submit.prompt_ids)
        params = submit.params
        members.append(Member(submit.request_id, place, params.max_tokens, params.min_tokens, params.seed))
    return SubmitAll(submits[0].params, prompts, members)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget a request; the engine frees its blocks before the next step and sends nothing more of it."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End all ranks now; the frontend has drained."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; sent once."""

    model: str
    variant: str
    communicator: str
    world_size: int
    device: str
    dtype: str
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int
    kv_blocks: int
    block_size: int  # tokens


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request, a part of Outputs; the last one of a request carries its `finish_reason`: `stop`, `length`."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, before or with the first token; the first is None
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    queue_seconds: float = 0.0  # from arrival to the first scheduling; with the first output
    prefill_seconds: float = 0.0  # from then to the first token


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What a step brought: one message, so that the frontend wakes up once a step and not once a token."""

    outputs: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that cannot run (too long for the KV cache, a bad grammar), or go on (a grammar that became too complex);
    `message` is for a 400, or a 429 if it might run later."""

    request_id: str
    message: str
    code: Literal["refused", "invalid_schema", "grammars_busy"] = "refused"  # the last one: it might


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The engine's state, after a step, at most every 0.25 s, and when it falls idle."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_queries: int  # tokens, since start
    prefix_hits: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    step_seconds: float  # the mean since the last Stats
    batch_tokens: list[int]  # tokens of each step since the last Stats
    all_reduce_share: float | None = None  # of the time of these steps, waiting for sums; None where the host cannot know


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on (a rank was lost, memory ran out); it exits after this."""

    message: str


ToEngine = Submit | SubmitAll | Abort | Shutdown
FromEngine = Ready | Outputs | Refused | Stats | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)

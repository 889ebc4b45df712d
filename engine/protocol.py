"""The messages between the HTTP frontend and the engine, in two one-way queues.

The frontend turns text into ids and ids into text; the engine has ids only. Messages are msgpack over ZeroMQ sockets
(PUSH to PULL, `ipc://`), so the two are separate processes and neither waits for the other.

    frontend -> engine   Attach, Submit, SubmitAll, Abort, LoadAdapter, UnloadAdapter, Shutdown
    engine -> frontend   Starting, Ready, Outputs, Refused, AdapterDone, Stats, Fatal

Both sides may end and start again. The engine drops what it gets before its Ready, and the frontend sends unfinished requests
again after a Ready (server/recovery.py). `check_types` refuses values of a wrong type where they are given.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import formatannotation
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from errors import UserError
from files import shown

Pooling = Literal["mean", "last"]  # of the hidden states of a prompt: of all tokens, or only the last one's
LIST_LIMIT = 20  # most top logprobs that a request may ask for
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._~:@+-]{0,199}"  # what a segment of a URL and a line of a log can hold
SMALLEST_REPETITION = 0.01  # as a penalty: divided by a far smaller one, a logit overflows


# --- arguments of the wrong type, named where they are given --------------------------------------------------------------------

# what is taken for one of these, the most common first, which is fast; NumPy's numbers, too
TAKEN = {int: (int, Integral), float: (float, int, Real), list: (list, tuple)}


def check_types(annotated: Any, values: Mapping[str, Any]) -> None:
    """Raise UserError for the first value that is not of its type. annotated: the class or function with the annotations. values:
    by name. What lists and dicts contain is not checked."""
    for name, classes, text in _annotations(annotated):
        value = values[name]
        if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
            raise UserError(f"{name} must be {text}, not {shown(value)}")


@cache
def _annotations(annotated: Any) -> list[tuple[str, tuple[type, ...], str]]:
    """The name, classes and text of each annotation."""
    hints = {name: hint for name, hint in get_type_hints(annotated).items() if name != "return"}
    return [(name, _classes(hint), formatannotation(hint)) for name, hint in hints.items()]


def _classes(hint: Any) -> tuple[type, ...]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return tuple(one for part in get_args(hint) for one in _classes(part))
    if origin is Literal:
        return tuple(map(type, get_args(hint)))
    return TAKEN.get(origin or hint, (origin or hint,))


# --- messages --------------------------------------------------------------------------------------------------------------------


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probability of one token id, and its rank in the distribution (1: the likeliest)."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One position: the chosen (or given) token, and the likeliest ones, best first."""

    chosen: Logprob
    top: list[Logprob]


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """After so many tokens of reasoning, its end is forced. start: the text at the start of an answer that begins it; empty: the answer
    begins in it. end: the text that ends it, with its ids."""

    tokens: int
    start: str
    end: str
    end_ids: list[int]


def _is_bias(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is generated. Raises UserError for a value of another type or out of range.

    `seed` is not random by default: a call with the same prompts and parameters gives the same tokens. On several ranks it must be the
    same, so that all of them draw the same tokens. The last group concerns text only: `LLM` and the server's frontend apply it, and the engine,
    which has ids only, ignores it.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # before these, no stop token and no stop string ends it
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest one
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    banned: list[list[int]] = []  # tokens that must not follow each other: the last of them is forbidden behind the others
    stop_token_ids: list[int] = []  # the token itself is output, then the sequence ends. The engine adds no EOS of its own
    logprobs: int | None = None  # None: no log-probabilities; k: those of the chosen token and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prediction: list[int] = []  # tokens that the answer may repeat: an engine that speculates drafts from them
    grammar: str | None = None  # in llguidance's grammar format, such as a JSON schema; None: free text
    # for a grammar that rarely forbids what the model writes: draw without its mask, which steps need not wait for, and only a
    # token that it forbids again with it
    late_grammar: bool = False
    grammar_optional: bool = False  # go on without a late grammar that is refused or fails, instead of ending with an error
    thinking: ThinkingBudget | None = None
    cache_salt: str | None = None  # only requests of the same one share cached prefixes; none takes its prompt for drafts
    pooling: Pooling | None = None  # the prompt's embedding instead of an answer: `max_tokens` and what is above have no effect

    stop: list[str] = []  # end before the first of these texts
    thinking_token_budget: int | None = None  # becomes `thinking`
    bad_words: list[str] = []  # becomes `banned`, see `text.banned_by`
    include_stop: bool = False  # end after it, so that the text has it
    skip_special: bool = True  # leave special tokens out of the text
    kept_special: list[int] = []  # but not these
    ignore_eos: bool = False  # `LLM` adds the model's EOS tokens to `stop_token_ids` unless this is set
    json_schema: dict[str, Any] | str | None = None  # becomes `grammar`: a JSON schema, or its text
    regex: str | None = None  # becomes `grammar`: of the whole answer, in the syntax of Rust's regex
    choice: list[str] | None = None  # becomes `grammar`: the answer is one of these texts

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are dropped before the draw."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    def of_draft(self) -> "SamplingParams":
        """What a draw depends on besides the tokens before it: a draft model draws with these."""
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )

    def of_answer(self, number: int) -> "SamplingParams":
        """Those of the answer with this number among all that share the parameters: it draws with seed + number, which wraps around."""
        seed = (self.seed + number + 2**63) % 2**64 - 2**63
        return self.changed(seed=seed) if number else self

    def changed(self, **values: int | ThinkingBudget | None) -> "SamplingParams":
        """A copy with other values, which the caller knows to be valid: a check of all others takes a millisecond for a thousand biases,
        and a request may have a thousand answers."""
        other = copy.copy(self)
        for name, value in values.items():
            msgspec.structs.force_setattr(other, name, value)
        return other

    def __post_init__(self) -> None:
        check_types(SamplingParams, msgspec.structs.asdict(self))
        for name, valid, rule in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            ("repetition_penalty", SMALLEST_REPETITION <= self.repetition_penalty <= 100, f"from {SMALLEST_REPETITION} to 100"),
            ("logit_bias", all(map(_is_bias, self.logit_bias.values())), "a finite number for each token id"),
            ("allowed_token_ids", self.allowed_token_ids is None or self.allowed_token_ids, "at least one token id, or None"),
            ("logprobs", (self.logprobs or 0) >= 0, "at least 0, or None"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "at least 0, or None"),
            ("temperature", 0 <= self.temperature <= 100, "from 0 (greedy) to 100"),
            ("top_k", 0 <= self.top_k < 2**63, "from 0 (all tokens) to 2^63 - 1"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("cache_salt", self.cache_salt != "", "a text of at least one character, or None"),
            ("thinking_token_budget", (self.thinking_token_budget or 0) >= 0, "at least 0, or None"),
            ("banned", all(self.banned), "lists of at least one token id"),
            ("bad_words", all(isinstance(text, str) and text for text in self.bad_words), "texts of at least one character"),
            ("stop", all(isinstance(text, str) and text for text in self.stop), "texts of at least one character"),
        ):
            if not valid:
                raise UserError(f"{name} must be {rule}, not {getattr(self, name)}")
        if self.choice is not None and not (self.choice and all(isinstance(text, str) and text for text in self.choice)):
            raise UserError(f"choice must be texts of at least one character, or None, not {shown(self.choice)}")
        if [self.grammar, self.json_schema, self.regex, self.choice].count(None) < 3:
            raise UserError("grammar, json_schema, regex and choice exclude each other; give one of them")
        excluded = {ids[0] for ids in self.banned if len(ids) == 1}.union(self.stop_token_ids if self.min_tokens else ())
        if self.allowed_token_ids and excluded.issuperset(self.allowed_token_ids):
            raise UserError(
                "each of allowed_token_ids is a bad word, or ends the answer before min_tokens; allow another token"
            )


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """When a waiting sequence starts: those of the lowest `priority` first, and equal ones in turn by `client`, of which each has a
    share of the engine by its `weight`."""

    client: str = ""
    weight: int = 1
    priority: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A new sequence, or one that ranks before these have begun. `generated`: the tokens of its answer that the frontend has;
    the engine computes them again and goes on behind them. Their outputs, and that of the prompt, are not repeated."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    generated: list[int] = []
    turn: Turn = Turn()
    adapter: str = ""  # its name; empty: none


class Member(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a SubmitAll that differ between its sequences. `prompt`: index in `prompts`."""

    request_id: str
    prompt: int
    max_tokens: int
    min_tokens: int
    seed: int
    generated: list[int] = []
    thinking: ThinkingBudget | None = None


class SubmitAll(msgspec.Struct, frozen=True, tag=True):
    """Many sequences of one HTTP request. Either all of them run or none; a `Refused` for the first one refuses all.

    What they share is sent once: a grammar may have a megabyte, and a request a thousand answers.
    """

    params: SamplingParams  # except for the fields of a Member
    prompts: list[list[int]]
    members: list[Member]
    turn: Turn = Turn()
    adapter: str = ""

    def submits(self) -> list[Submit]:
        """A Submit for each member. They share their lists and texts."""
        return [
            Submit(
                one.request_id,
                self.prompts[one.prompt],
                self.params.changed(max_tokens=one.max_tokens, min_tokens=one.min_tokens, seed=one.seed, thinking=one.thinking),
                one.generated,
                self.turn,
                self.adapter,
            )
            for one in self.members
        ]


def joined(submits: Sequence[Submit]) -> SubmitAll:
    """Join Submits into one message. They have the same turn and adapter, and their params differ only in the fields of a Member. A prompt is
    sent once if it is the same object in several Submits."""
    places: dict[int, int] = {}
    prompts: list[list[int]] = []
    members: list[Member] = []
    for submit in submits:
        place = places.setdefault(id(submit.prompt_ids), len(prompts))
        if place == len(prompts):
            prompts.append(submit.prompt_ids)
        params = submit.params
        own = params.max_tokens, params.min_tokens, params.seed, submit.generated, params.thinking
        members.append(Member(submit.request_id, place, *own))
    return SubmitAll(submits[0].params, prompts, members, submits[0].turn, submits[0].adapter)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Remove a request. The engine frees its blocks before the next step and sends nothing more about it.

    used: how many tokens the answer has, if the frontend has found a stop string in it. None: as many as were sent."""

    request_id: str
    used: int | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter under this name. An `AdapterDone` answers. Requests for it wait meanwhile. path: its folder on the ranks' hosts."""

    request_id: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Unload an adapter, unless a request uses it. An `AdapterDone` answers."""

    request_id: str
    name: str


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The first message of a frontend that replaces one that has ended: remove all requests, and send Ready again."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End all ranks now; the frontend has drained its requests."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """The ranks have started and load the model. pid: rank 0's process id."""

    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, and requests may be sent."""

    model: str
    variant: str
    communicator: str
    world_size: int
    device: str
    dtype: str
    max_model_len: int  # tokens that prompt and answer can have together
    vocab_size: int
    kv_blocks: int
    block_size: int  # tokens
    pid: int = 0  # rank 0's process; 0: not to be watched
    hidden_size: int = 0  # the width of embeddings
    max_batch_tokens: int = 0  # of a step
    causal: bool = True  # False: the model only makes embeddings
    max_num_seqs: int = 1  # of a step
    adapters: dict[str, str] = {}  # their folders, by name
    longest_start: float = 0.0  # seconds, of this start of the ranks and those before it


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request, a part of Outputs. A request's last one has its `finish_reason`: `stop`, `length`."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids, if requested
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # only in the first output; the first entry is None
    drafted: int = 0  # tokens that were guessed and verified (see speculation.py), and how many of them were right
    accepted: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; only in the first output, as are the next two
    queue_seconds: float = 0.0  # from arrival to the first scheduling
    prefill_seconds: float = 0.0  # from the first scheduling to the first token
    embedding: bytes | None = None  # with `pooling`, and then no tokens: fp32, little-endian, not normalized


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """A step's outputs in one message, so that the frontend wakes up once a step and not once a token."""

    outputs: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that cannot run (too long for the KV cache, a bad grammar) or continue (a grammar that became too complex, numbers
    that are not finite).

    The frontend answers with `message` and status 400, 429 for `grammars_busy`: it may run later, or 500 for `overflow`.
    """

    request_id: str
    message: str
    code: Literal["refused", "invalid_schema", "grammars_busy", "overflow"] = "refused"


class AdapterDone(msgspec.Struct, frozen=True, tag=True):
    """What became of a `LoadAdapter`, or, with path None, of an `UnloadAdapter`. error: empty if it succeeded."""

    request_id: str
    name: str
    path: str | None
    error: str


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """How many drafts were verified, the tokens that they had, and how many of those were right."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The engine's state, sent after a step, at most every 0.25 s, and while the engine is idle."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_queries: int = 0  # tokens, since start
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0  # the mean since the last Stats
    batch_tokens: list[int] = []  # tokens of each step since the last Stats
    all_reduce_share: float | None = None  # of these steps' time, spent waiting for all-reduces; None: not known on the host
    idle_share: float | None = None  # of these steps' time, in which the GPU had no step to compute; None on a CPU
    drafted: dict[str, Drafted] = {}  # by source, since start
    token_seconds: float | None = None  # of the step that took least for each of its tokens; None: no step yet
    pid: int = 0  # as in `Ready`

    @property
    def kv_cache_usage(self) -> float:
        return self.kv_blocks_used / max(self.kv_blocks_total, 1)


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The ranks have ended and will not be started again. Sent by the process that started them, or the frontend."""

    message: str


ToEngine = Attach | Submit | SubmitAll | Abort | LoadAdapter | UnloadAdapter | Shutdown
FromEngine = Starting | Ready | Outputs | Refused | AdapterDone | Stats | Fatal

encode: Callable[[ToEngine | FromEngine], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode

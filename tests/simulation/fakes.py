"""The engine without a model: a runner whose tokens are hashes, and grammars that end or fail after a number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import comms
from checkpoints.lora import LoraLimits
from config import ModelConfig
from engine.adapters import Adapter, Adapters
from engine.core import Engine
from engine.draft_costs import Costs
from engine.grammars import COMPILED, FAILED
from engine.limits import EngineLimits
from engine.paged_cache import PagedCache
from engine.protocol import SamplingParams, Submit
from engine.runner import InFlightStep, StepResult
from engine.sampler import reads_tokens
from engine.sequence import Chunk, Sequence
from errors import UserError
from model import Transformer
from tp import World

VOCAB = 6  # few ids, so that unrelated texts share prefixes
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, comms.Local())
EMPTY = 1
FORBIDDEN = 3  # the token that late grammars forbid
ADAPTERS = ("1", "2")  # their names are their numbers, with which their texts begin


def salted(params: SamplingParams) -> int:
    """A number of the salt, with which a text begins, so that no other text has the same prefixes."""
    return 10 * len(params.cache_salt or "")


def follow(prefix: int, token: int) -> int:
    """The hash of a prefix with one more token. Equal on all machines, because it is of integers."""
    return hash((prefix, token))


def masked(token: int) -> int:
    """What is drawn in a token's place if a late grammar forbids it."""
    return FORBIDDEN + 1 if token == FORBIDDEN else token


def draw(prefix: int, last: int, before: int, seed: int) -> int:
    """The token after a prefix that ends with the tokens `before` and `last`. Mostly it depends on these two only, so that texts
    repeat themselves and drafts are often right."""
    chance = hash((prefix, seed)) >> 7
    return (chance >> 3) % VOCAB if chance % 8 == 0 else (3 * last + before + seed) % VOCAB


@dataclass(frozen=True)
class FakeGrammar:
    """Text form: `steps ends fails`: steps that its compilation takes, tokens after which the answer is complete, and tokens at
    which it becomes too complex; 0: it does not."""

    steps: int
    ends: int
    fails: int

    @classmethod
    def of(cls, text: str) -> "FakeGrammar":
        return cls(*map(int, text.split()))


def alone(submit: Submit) -> tuple[list[int], str]:
    """The tokens and the finish reason of a request that is served alone, without faults. `error`: its grammar fails."""
    params, tokens, prefix = submit.params, list(submit.prompt_ids), EMPTY + int(submit.adapter or 0) + salted(submit.params)
    for token in tokens:
        prefix = follow(prefix, token)
    grammar = FakeGrammar.of(params.grammar) if params.grammar else None
    before = tokens[-2] if len(tokens) > 1 else 0
    last, output = tokens[-1], list[int]()
    while True:
        before, last = last, draw(prefix, last, before, params.seed)
        last = masked(last) if params.late_grammar else last
        output.append(last)
        prefix = follow(prefix, last)
        count = len(output)
        if grammar and count == grammar.fails:
            return output[:-1], "error"
        if last in params.stop_token_ids and count > params.min_tokens:
            return output, "stop"
        if count == params.max_tokens:
            return output, "length"
        if grammar and count == grammar.ends:
            return output, "stop"


class FakeMatcher:
    """A matcher that counts tokens."""

    def __init__(self, grammar: FakeGrammar, count: int = 0) -> None:
        self.grammar, self.count = grammar, count

    def deep_copy(self) -> "FakeMatcher":
        return FakeMatcher(self.grammar, self.count)

    def consume_token(self, token: int) -> None:
        assert not self.is_stopped(), "a grammar that has ended gets another token"
        self.count += 1

    def try_consume_tokens(self, tokens: list[int]) -> int:
        if tokens == [FORBIDDEN]:
            return 0
        self.consume_tokens(tokens)
        return len(tokens)

    def consume_tokens(self, tokens: list[int]) -> None:
        for token in tokens:
            self.consume_token(token)

    def is_accepting(self) -> bool:
        return False

    def is_error(self) -> bool:
        return self.count == self.grammar.fails

    def is_stopped(self) -> bool:
        return self.count in (self.grammar.fails, self.grammar.ends)

    def get_error(self) -> str:
        return "too complex"


@dataclass
class FakeCompilation:
    text: str
    due: int
    now: Callable[[], int]
    matcher: Any = None
    error: str = ""

    @property
    def state(self) -> int:
        if self.now() < self.due:
            return 0
        grammar = FakeGrammar.of(self.text)
        self.matcher = FakeMatcher(grammar)
        return COMPILED if grammar.ends else FAILED


class FakeGrammars:
    """Compiles in simulated time: all ranks are ready at the same step, as `Engine.admit` would make them agree."""

    tokenizer = None

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now

    def check(self, text: str) -> None:
        if text.startswith("bad"):
            raise UserError("a bad grammar")

    def start(self, text: str) -> FakeCompilation:
        return FakeCompilation(text, self.now() + FakeGrammar.of(text).steps, self.now)

    def digits(self, text: str) -> None:
        """None are bounded."""

    def keep(self, compilation: FakeCompilation) -> None:
        pass

    def drop(self, compilation: FakeCompilation) -> None:
        pass

    def forget(self, matcher: FakeMatcher) -> None:
        pass


class FakeRunner:
    """Writes into each place of the cache the hash of the prefix that ends there, and checks for each chunk that the places before
    it hold what they must. Draws tokens from these hashes."""

    def __init__(self, engine: Engine, check: Callable[[list[Chunk]], None]) -> None:
        blocks = engine.scheduler.blocks
        self.size, self.check = blocks.block_size, check
        self.cache = [0] * (blocks.n_blocks * self.size)
        self.prefixes: dict[Sequence, list[int]] = {}  # of the running sequences' known tokens, and of one in flight
        self.graphs = None
        self.decode = self
        self.model = engine.runner.model  # for statistics
        self.text_ids = engine.runner.text_ids
        self.idle_seconds = 0.0

    def is_captured(self, sequences: int) -> bool:
        return sequences % 5 != 4

    def rest(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def launch(self, chunks: list[Chunk], after: InFlightStep | None = None) -> InFlightStep:
        chunks = list(chunks)
        self.check(chunks)
        ahead = dict(zip([c.sequence for c in after.sampling], after.drawn, strict=True)) if after and after.drawn else {}
        rows = [self._write(chunk, ahead) for chunk in chunks]
        for chunk in chunks:  # a step may compute its chunks in any order
            self._verify(chunk)
        sampling = [c for c in chunks if c.samples]
        step = InFlightStep(chunks, sampling, None, any(c.draft for c in chunks))  # type: ignore[arg-type]
        step.logprobs = [row for row, c in zip(rows, chunks, strict=True) if c.samples]  # type: ignore[assignment]
        if all(c.is_known or not reads_tokens(c.sequence) for c in sampling):
            self.draw(step)
        if len(self.prefixes) > 4 * len(chunks) + 16:
            self.prefixes = {s: p for s, p in self.prefixes.items() if s.finish_reason is None and s.blocks}
        return step

    def _write(self, chunk: Chunk, ahead: dict[Sequence, int]) -> list[tuple[int, int, int]]:
        """Write the chunk's places. Returns what each drawn token depends on."""
        sequence, size = chunk.sequence, self.size
        text = sequence.tokens if chunk.is_known else [*sequence.tokens, ahead[sequence]]
        known = self.prefixes.setdefault(sequence, [])
        if chunk.is_known:
            del known[len(sequence.tokens) :]  # a forbidden token, which was in flight
        root = EMPTY + (sequence.adapter.number if sequence.adapter else 0) + salted(sequence.params)
        prefix = known[-1] if known else root
        for token in text[len(known) : chunk.first_drawn]:
            prefix = follow(prefix, token)
            known.append(prefix)
        prefixes = known[chunk.start : chunk.first_drawn]
        if chunk.draft:
            text = [*text[: chunk.first_drawn], *chunk.draft]
            prefix = known[chunk.first_drawn - 1]
            for token in chunk.draft:
                prefix = follow(prefix, token)
                prefixes.append(prefix)
        for position, prefix in enumerate(prefixes, chunk.start):
            self.cache[sequence.blocks[position // size] * size + position % size] = prefix
        if not chunk.samples:
            return []
        ends = range(chunk.first_drawn, chunk.stop + 1)
        return [(prefixes[end - 1 - chunk.start], text[end - 1], text[end - 2] if end > 1 else 0) for end in ends]

    def _verify(self, chunk: Chunk) -> None:
        known, size, cache = self.prefixes[chunk.sequence], self.size, self.cache
        stop, blocks = chunk.first_drawn, chunk.sequence.blocks
        for i in range(0, stop, size):
            place, end = blocks[i // size] * size, min(i + size, stop)
            assert cache[place : place + end - i] == known[i:end], (
                f"{chunk.sequence.request_id}: block {i // size} holds another text"
            )

    def draw(self, step: InFlightStep) -> None:
        if step.drawn is not None:
            return
        tokens = []
        for chunk, rows in zip(step.sampling, step.logprobs or [], strict=True):  # type: ignore[call-overload]
            state, params = chunk.sequence.state, chunk.sequence.params
            if params.late_grammar:
                drawn = [draw(*row, params.seed) for row in rows]
                tokens += [masked(t) if i == state.again else t for i, t in enumerate(drawn, chunk.first_drawn)]
                continue
            if state.matcher is None and state.grammar is not None:
                state.matcher = state.grammar.deep_copy()
                state.matcher.consume_tokens(chunk.sequence.tokens[chunk.sequence.prompt_length :])  # of one submitted again
            if state.matcher is not None and chunk.sequence.finish_reason is None:
                position = chunk.first_drawn - chunk.sequence.prompt_length
                assert state.matcher.count == position, "a mask is not that of the token's position"
            tokens += [draw(*row, params.seed) for row in rows]
        step.drawn = tokens  # type: ignore[assignment]

    def collect(self, step: InFlightStep) -> StepResult:
        tokens: Any = step.drawn
        return StepResult(tokens or [], [None] * len(tokens or []))


@cache
def smallest_model() -> Transformer:
    shape = dict(vocab_size=VOCAB, hidden_size=4, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4, intermediate_size=4)
    return Transformer(ModelConfig(**shape, max_seq_len=512), comms.Local(), CPU, torch.float32)


def fake_engine(limits: EngineLimits, n_blocks: int, look_ahead: bool, now: Callable[[], int], check: Any) -> Engine:
    """An engine with `n_blocks` blocks and a FakeRunner. check: called with the chunks of each step."""
    model = smallest_model()
    size = PagedCache.bytes_per_block(model.attention_slots, limits.block_size, model.n_kv_heads, 4, torch.float32)
    from dataclasses import replace

    adapters = Adapters(model, LoraLimits(len(ADAPTERS), 1), ALONE)
    adapters.known = {name: Adapter(name, "", slot, int(name)) for slot, name in enumerate(ADAPTERS)}
    engine = Engine(model, None, replace(limits, kv_memory=float(n_blocks * size)), ALONE, adapters=adapters)
    assert engine.scheduler.blocks.n_blocks == n_blocks
    engine.runner = FakeRunner(engine, check)  # type: ignore[assignment]
    engine.grammars = FakeGrammars(now)  # type: ignore[assignment]
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})
    engine.look_ahead = look_ahead
    return engine

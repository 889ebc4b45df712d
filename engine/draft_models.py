"""Drafts by a smaller model: a chain of its own draws, each of which it computes from the one before.

The model has a KV cache of its own with the same block tables as the base: the same blocks, other tensors. So a token has a place
in it as soon as it has one in the base's, and nobody else keeps accounts. The tokens that it lacks, such as a prompt, are computed
when a sequence is to get a draft; while drafts do not pay, it costs nothing. It draws as the base does, with the same noise,
temperature and filters, which makes its draws as likely as can be those of the base. A chain runs without the host: on a GPU each
token is one replay of a decode graph, which leaves its draw to the next.

A small model is held whole by every rank: reading 2 GB takes less than the all-reduces of a sharded one. Its ranks compute the same
with the same bits, so they agree on drafts without a message. A larger one is sharded like the base.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import torch

from checkpoint import load_model
from comm import Local
from config import ModelConfig
from eagle import EagleConfig, EagleHead, check_head, is_head, load_head, random_config, random_head
from engine.block_manager import BlockManager
from engine.logits import SamplingState, sibling
from engine.protocol import SamplingParams
from engine.runner import InFlightStep, Runner
from engine.sequence import Chunk, Sequence, count_accepted
from errors import UserError
from files import model_folder
from memory import weight_bytes
from model import Transformer
from presets import has_random_weights, model_config
from tokenizer import Tokenizer
from tokenizer_files import find_tokenizer, load_tokenizer
from tp import World, stream_shards

TEXT, AUTO = "ngram", "auto"  # what `--speculate` takes instead of a model
RANDOM_HEAD = "random-head"  # a head with random weights, for a base with random weights
EMBEDDED = "draft"  # the folder of a checkpoint's own head
REPLICATED = 2 << 30  # bytes of weights up to which every rank holds a whole draft model
MEASURED_CHAIN = 3  # tokens of the chains that `Chains.seconds` measures
NO_IDENTITY = -2  # the identity of no contents


# --- which model ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """A draft model or head that `--speculate` names."""

    name: str
    config: ModelConfig | EagleConfig
    base: ModelConfig

    def load(self, world: World, dtype: torch.dtype, seed: int = 0) -> Transformer | EagleHead:
        """The model on this rank: whole if it is small or cannot be split, else sharded like the base; a head as
        `eagle.load_head` has it. Collective. Raises UserError."""
        if isinstance(self.config, EagleConfig) and self.name == RANDOM_HEAD:
            return random_head(self.config, world, dtype)
        if isinstance(self.config, EagleConfig):
            return load_head(Path(self.name), self.base, world, dtype)
        return load_model(self.name, self.config, world_of(self.config, world, dtype), dtype, seed)


def find_draft(
    speculate: str | None, model: str | None, base: ModelConfig, tokenizer: Tokenizer | None, ranks: int
) -> Draft | None:
    """What `--speculate` names, None for text. model: the base's folder, whose head `auto` takes, if it is known. Raises UserError
    for a model that does not exist or has another vocabulary than the base, and for a head of other widths."""
    if speculate == AUTO:
        speculate = str(Path(model) / EMBEDDED) if model and (Path(model) / EMBEDDED).is_dir() else TEXT
    if speculate in (None, TEXT):
        return None
    if speculate == RANDOM_HEAD:
        if model is None or not has_random_weights(model):
            raise UserError(f"--speculate {RANDOM_HEAD} is for benchmarks of presets, which have random weights; name a folder")
        return Draft(speculate, random_config(base), base)
    if (Path(speculate) / "config.json").exists() and is_head(Path(speculate)):
        if base.kind.speed_limit and ranks > 1:
            raise UserError(
                f"--speculate {speculate}: a draft head does not go with {base.variant} on several ranks; leave it out"
            )
        return Draft(speculate, check_head(Path(speculate), base).hollow.config, base)
    try:
        config = model_config(speculate, None, 1)
    except UserError as e:
        raise UserError(f"--speculate {speculate} is neither {TEXT}, {AUTO} nor a model: {e}") from None
    if config.vocab_size != base.vocab_size:
        raise UserError(
            f"--speculate {speculate}: its vocabulary has {config.vocab_size} tokens, the model's {base.vocab_size}; "
            "a draft model needs the same vocabulary"
        )
    folder = model_folder(speculate)
    if tokenizer is not None and not has_random_weights(speculate) and find_tokenizer(folder) is not None:
        own = load_tokenizer(folder)
        if (own.pieces.data, own.special_ids) != (tokenizer.pieces.data, tokenizer.special_ids):
            raise UserError(
                f"--speculate {speculate}: its tokenizer has other tokens than the model's; a draft model needs the same"
            )
    return Draft(speculate, config, base)


def check_accept_rate(rate: float | None, draft: Draft | None, model: str) -> None:
    """Raises UserError unless a stand-in for the agreement of drafts (`EngineLimits.accept_rate`) has sense."""
    if rate is None:
        return
    if not 0 <= rate <= 1:
        raise UserError(f"--accept-rate is a probability from 0 to 1, not {rate:g}")
    if not has_random_weights(model):
        raise UserError(
            f"--accept-rate is for benchmarks of models with random weights, and {model} has trained ones; leave it out"
        )
    if draft is None:
        raise UserError(f"--accept-rate needs drafts of a model or head; give --speculate {RANDOM_HEAD}")


def world_of(config: ModelConfig, world: World, dtype: torch.dtype) -> World:
    """The ranks among which a draft model is split: all, or only this one."""
    alone = World(0, 1, world.device, Local())
    if weight_bytes(config, 1, dtype) <= REPLICATED:
        return alone
    try:
        stream_shards(config, 0, world.world_size)
    except UserError:
        return alone
    return world


# --- chains --------------------------------------------------------------------------------------------------------------------


@dataclass
class Shadow:
    """A sequence as the draft model sees it. done: how many of its tokens are in the model's cache for good. marked: how many of
    its blocks are marked as held. guess: the tokens of its last chain, and where they began."""

    sequence: Sequence
    done: int
    marked: int
    guess: list[int] = field(default_factory=list)
    begin: int = 0


class Chains:
    """Drafts of a model: chains of its draws."""

    name = "model"

    def __init__(self, runner: Runner, blocks: BlockManager, longest: int) -> None:
        """runner: of the draft model. blocks: of the base, for which the runner's cache has the same places. longest: the draft
        model's context; behind it there are no drafts."""
        self.runner, self.blocks, self.longest = runner, blocks, longest
        self.ready: torch.cuda.Event | None = None  # when the device had the chains of the last `draft`, if it made any
        # by block: the identity of the contents that the draft model has computed, too
        self._held = [NO_IDENTITY] * blocks.n_blocks
        self._shadows: WeakKeyDictionary[Sequence, Shadow] = WeakKeyDictionary()
        self._lost: WeakSet[Sequence] = WeakSet()  # sequences for which it does not draft any more

    def reach(self, sequence: Sequence) -> int:
        """The most tokens that it can draft for the sequence now."""
        return 0 if sequence in self._lost else max(0, self.longest - sequence.length)

    def follows(self, sequence: Sequence) -> bool:
        """Whether it has to see what each step computes for the sequence."""
        return False

    def observe(self, step: InFlightStep) -> None:
        """Note a step that was collected, with no other launched behind it."""

    def give_up(self, sequence: Sequence) -> None:
        """Draft no more for the sequence."""
        self._lost.add(sequence)

    def pause(self, sequence: Sequence) -> None:
        """See no more steps of the sequence until it is to get a draft."""

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Draft so many tokens for each sequence, which has blocks for them; none if it still lacks too many tokens. All tokens of
        the sequences must be known. The same on all ranks."""
        self.ready = None
        self.runner.decode.forget()  # the last chain's tokens
        shadows, chunks = self._catch_up(counts)
        if not chunks:
            return {}
        flights = [self.runner.launch(chunks)]
        originals = {id(shadow.sequence): s for s, shadow in shadows.items() if s in counts}
        ready = [s for chunk in flights[0].sampling if (s := originals.get(id(chunk.sequence)))]
        for step in range(1, max((counts[s] for s in ready), default=1)):
            # by falling length, so these are the first rows of the step before, and the device has them without the host
            going = [shadows[s].sequence for s in ready if counts[s] > step]
            self.runner.decode.keep(len(going))
            flights.append(self._link(going, step, flights[-1]))
        if not ready:
            return {}
        self.runner.collect(flights[-1])
        self.ready = flights[-1].ready
        tokens: dict[int, list[int]] = {}
        for flight in flights:
            assert flight.tokens is not None
            for chunk, token in zip(flight.sampling, flight.tokens.tolist(), strict=True):
                tokens.setdefault(id(chunk.sequence), []).append(token)
        for shadow in (shadows[s] for s in ready):
            shadow.guess, shadow.begin = tokens[id(shadow.sequence)], len(shadow.sequence.tokens)
        return {s: shadows[s].guess for s in ready}

    def _link(self, going: list[Sequence], step: int, after: InFlightStep) -> InFlightStep:
        """Draw another token of each chain. step: how many they have. after: what drew the last ones."""
        chunks = [Chunk(s, len(s.tokens) + step - 1, 1, samples=True, is_known=False) for s in going]
        return self.runner.launch(chunks, after=after)

    def _shadow(self, sequence: Sequence) -> Shadow:
        """The sequence's shadow, up to date."""
        shadow = self._shadows.get(sequence)
        if shadow is None or shadow.sequence.blocks is not sequence.blocks:  # new, or preempted since
            held = self._count_held(sequence)
            copy = Sequence(sequence.request_id, self._tokens(sequence), 0, plain(sequence.params), blocks=sequence.blocks)
            copy.state = sibling(sequence.state)
            shadow = self._shadows[sequence] = Shadow(copy, held * self.blocks.block_size, held)
        return shadow

    def _tokens(self, sequence: Sequence) -> list[int]:
        """The tokens that the model reads; the list grows with the sequence's."""
        return sequence.tokens

    def _count_held(self, sequence: Sequence) -> int:
        """How many of the sequence's first blocks the draft model has computed, for this or for another sequence."""
        full = sequence.blocks[: sequence.computed // self.blocks.block_size]
        return next((i for i, b in enumerate(full) if self._held[b] != self.blocks.identities[b]), len(full))

    def _catch_up(self, counts: Mapping[Sequence, int]) -> tuple[dict[Sequence, Shadow], list[Chunk]]:
        """The shadows, and chunks of the tokens that the draft model lacks, as many as a step takes, by falling length of the
        chains. Of the last chain, the tokens that proved right need not be computed again."""
        ordered = sorted(counts, key=lambda s: -counts[s])
        shadows, chunks, budget = {s: self._shadow(s) for s in ordered}, [], self.runner.capacity.tokens
        for shadow in shadows.values():
            tokens = shadow.sequence.tokens
            if shadow.guess:
                shadow.done = shadow.begin + min(count_accepted(shadow.guess, tokens[shadow.begin :]), len(shadow.guess) - 1)
                shadow.guess = []
            shadow.done = min(shadow.done, len(tokens) - 1)
            if count := min(len(tokens) - shadow.done, budget):
                chunks.append(self._chunk(shadow, count))
                budget -= count
        return shadows, chunks

    def _chunk(self, shadow: Shadow, count: int) -> Chunk:
        """The next `count` tokens, which count as done from now on."""
        sequence, start, size = shadow.sequence, shadow.done, self.blocks.block_size
        shadow.done += count
        for block in sequence.blocks[shadow.marked : shadow.done // size]:
            self._held[block] = self.blocks.identities[block]
        shadow.marked = max(shadow.marked, shadow.done // size)
        return Chunk(sequence, start, count, shadow.done == len(sequence.tokens), is_known=True)

    def seconds(self, chains: int, tokens: int = MEASURED_CHAIN, seen: int = 1) -> float:
        """The time of a token in chains of so many tokens for so many sequences, of which it must first see `seen` tokens. To be
        called before the first draft. Collective."""
        tokens = max(1, min(tokens, self.longest - 2, self.runner.max_length - 2))
        blocks = [i % self.blocks.n_blocks for i in range(self.blocks.blocks_for(seen + tokens + 1))]
        invented = [
            Sequence("", [0] * (seen + 1), 0, SamplingParams(), blocks=blocks, computed=seen, state=SamplingState())
            for _ in range(chains)
        ]
        self.observe(self._invented_step(invented))
        start = time.perf_counter()
        self.draft(dict.fromkeys(invented, tokens))
        seconds = time.perf_counter() - start
        self._held = [NO_IDENTITY] * self.blocks.n_blocks
        self.runner.rest()
        return seconds / tokens

    def _invented_step(self, sequences: list[Sequence]) -> InFlightStep:
        """A step that has computed all tokens of each sequence but the last."""
        chunks = [Chunk(s, 0, s.computed, samples=True, is_known=True) for s in sequences]
        return InFlightStep(chunks, chunks, torch.empty(0), has_drafts=False)


def plain(params: SamplingParams) -> SamplingParams:
    """What a draw depends on besides the tokens before it."""
    p = params
    return SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, seed=p.seed)

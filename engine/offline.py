"""Generation and scoring without a server: one batch of equally long prompts, one token a step.

On a CPU with a contiguous KV cache, on a GPU with the server's runner and its paged cache.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention import Causal, ContiguousCache
from config import ModelConfig
from engine.graph_runner import Capacity, GraphRunner
from engine.logits import SCORE_CHUNK, SamplingState
from engine.paged_cache import PagedCache
from engine.protocol import RequestParams
from engine.runner import Flight, is_plain
from engine.sampler import SamplingBatch, SamplingParams, sample
from engine.scheduler import Chunk, Sequence
from errors import UserError
from model import Transformer

PREFILL_TOKENS = 1 << 16  # most tokens of one prefill step on a GPU: enough to use it fully, and the activations fit
BLOCK_SIZE = 16  # tokens of a KV-cache block


@dataclass
class Timing:
    """Seconds of one `generate` call, each measured until the tokens are on the host."""

    prefill: float = 0.0
    steps: list[float] = field(default_factory=list)  # one a decode step


def check_prompts(config: ModelConfig, prompts: List[List[int]], new_tokens: int) -> None:
    """Raise UserError unless the model can continue each prompt by `new_tokens` tokens."""
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        outside = next((i for i in prompt if not 0 <= i < config.vocab_size), None)
        if outside is not None:
            raise UserError(
                f"token id {outside} is outside the model's vocabulary of {config.vocab_size}; use ids 0 to {config.vocab_size - 1}"
            )
        if len(prompt) + new_tokens > config.max_seq_len:
            raise UserError(
                f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the model's context of {config.max_seq_len}; "
                "shorten the prompt or ask for fewer (--max-new-tokens)"
            )


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: List[List[int]],
    params: List[SamplingParams],
    new_tokens: int,
    timing: Timing,
) -> Iterator[list[int]]:
    """Yield the next token of every sequence, `new_tokens` times or until the caller stops iterating.

    prompts: B lists of equally many token ids; params: one entry a sequence. Raises UserError for prompts that do not fit.
    """
    check_prompts(model.config, prompts, new_tokens)
    if len({len(p) for p in prompts}) > 1:
        raise UserError("the prompts of one batch must be equally long")
    stepwise = _paged if model.norm.weight.is_cuda else _contiguous
    start = time.perf_counter()
    for step, tokens in enumerate(stepwise(model, prompts, params, new_tokens)):
        now = time.perf_counter()
        if step == 0:
            timing.prefill = now - start
        else:
            timing.steps.append(now - start)
        yield tokens
        start = time.perf_counter()


def _contiguous(
    model: Transformer, prompts: List[List[int]], params: List[SamplingParams], new_tokens: int
) -> Iterator[list[int]]:
    weight = model.norm.weight
    cache = ContiguousCache(
        model.attention_slots,
        len(prompts),
        model.n_kv_heads,
        len(prompts[0]) + new_tokens,
        model.config.head_dim,
        weight.device,
        weight.dtype,
    )
    batch = SamplingBatch.of(params, weight.device)
    tokens = torch.tensor(prompts, device=weight.device)
    for _ in range(new_tokens):
        tokens = next_tokens(model, tokens, cache, batch)
        yield tokens[:, 0].tolist()  # waits for the device


def next_tokens(model: Transformer, tokens: Tensor, cache: ContiguousCache, batch: SamplingBatch) -> Tensor:
    """Compute (B, T) ids with the cache and sample the token after them: (B, 1)."""
    last = model.hidden(tokens, cache.append(tokens.shape[1]))[:, -1]
    positions = torch.full((len(tokens), 1), cache.length, device=tokens.device)
    return sample(model.logits(last), batch, positions)[:, None]


def _runner(model: Transformer, capacity: Capacity) -> GraphRunner:
    """A runner with exactly this capacity. The model keeps the last one, so a runner and its graphs are freed with it."""
    runner: GraphRunner | None = model.__dict__.pop("_offline_runner", None)
    if runner is None or runner.capacity != capacity:
        del runner  # frees its cache before the new one is allocated
        weight = model.norm.weight
        shape = capacity.sequences * capacity.blocks, BLOCK_SIZE, model.n_kv_heads, model.config.head_dim
        cache = PagedCache(model.attention_slots, *shape, weight.device, weight.dtype)
        runner = GraphRunner(model, cache, model.config.vocab_size, capacity)
    model.__dict__["_offline_runner"] = runner
    return runner


def _paged(model: Transformer, prompts: List[List[int]], params: List[SamplingParams], new_tokens: int) -> Iterator[list[int]]:
    """Generate with the server's runner: the next step is launched before waiting for this step's tokens."""
    length = len(prompts[0])
    blocks = -(-(length + new_tokens) // BLOCK_SIZE)
    together = max(1, min(len(prompts), PREFILL_TOKENS // length))  # prompts in one step
    runner = _runner(model, Capacity(len(prompts), together * length, blocks))
    sequences = [_sequence(i, list(prompt), p, blocks) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
    tokens: list[int] = []
    for first in range(0, len(sequences), together):
        prefill = runner.launch([Chunk(s, 0, length) for s in sequences[first : first + together]])
        tokens += runner.collect(prefill).tokens
    ahead: Flight | None = None
    for stop in range(length + 1, length + new_tokens):
        yield _recorded(sequences, tokens)
        chunks = [Chunk(s, stop - 1, 1) for s in sequences]
        flight: Flight = ahead or runner.launch(chunks)
        following = [Chunk(s, stop, 1) for s in sequences]
        known = stop + 1 < length + new_tokens and all(map(is_plain, sequences))
        ahead = runner.launch(following, after=flight) if known else None
        tokens = runner.collect(flight).tokens
    yield _recorded(sequences, tokens)
    model.comm.check()


def _sequence(i: int, prompt: list[int], p: SamplingParams, blocks: int) -> Sequence:
    """The batch's sequence i. It has the cache's blocks from i * `blocks` on, `blocks` of them."""
    length = len(prompt)
    params = RequestParams(
        max_tokens=blocks * BLOCK_SIZE, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, seed=p.seed
    )
    own = list(range(i * blocks, (i + 1) * blocks))
    return Sequence(str(i), prompt, length, params, blocks=own, state=SamplingState())


def _recorded(sequences: list[Sequence], tokens: list[int]) -> list[int]:
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.tokens.append(token)
    return tokens


@torch.inference_mode()
def score(model: Transformer, prompt: List[int]) -> tuple[list[float | None], list[int]]:
    """The natural log-probability of each token given those before it (None for the first), and for each token the arg-max
    prediction of the next one."""
    check_prompts(model.config, [prompt], 0)
    tokens = torch.tensor([prompt], device=model.norm.weight.device)
    hidden = model.hidden(tokens, Causal(len(prompt), tokens.device))[0]
    logprobs: list[float | None] = [None]
    argmax: list[int] = []
    for first in range(0, len(prompt), SCORE_CHUNK):
        logits = model.logits(hidden[first : first + SCORE_CHUNK])
        targets = tokens[0, first + 1 : first + 1 + len(logits)]
        argmax += logits.argmax(-1).tolist()
        logprobs += logits[: len(targets)].log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
    return logprobs, argmax

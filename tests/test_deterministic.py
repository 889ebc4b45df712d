"""--deterministic: the same bits alone, in a batch, in chunks, after a preemption, with drafts, on 1, 2 and 4 ranks, and in training."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
import determinism
from attention import Causal, causal_mask
from comm import Local, TreeCommunicator
from communicators import choose
from engine.core import Engine, EngineLimits
from engine.drafts import Costs
from engine.paged_cache import PagedCache
from engine.protocol import Submit
from errors import UserError
from kernels import exact
from kernels.sampling import exponential_noise, gumbel_noise
from presets import model_config
from tests.engine.test_engine import ALONE, CPU, Answer, config_of, random_model, random_submits, serve
from tests.support.ranks import Ranks
from tp import World, init_world, stream_shards
from training.batches import IGNORED, Batch
from training.executor import Execution, Executor
from training.losses import cross_entropy
from training.sharding import Mesh, Sharding

VARIANTS = ["standard", "parallel", "ladder", "hybrid-list", "desync-2x:4", "desync-custom", "biased", "qwen3-some-layers"]


@contextmanager
def deterministic() -> Iterator[None]:
    determinism.enable()
    try:
        yield
    finally:
        determinism.enable(False)


# --- the same bits whatever runs beside ------------------------------------------------------------------------------------


def answers_of(
    world: World, directory: Path, submits: list[Submit], dtype: torch.dtype, quantize: str | None, seed: int, hard: bool
) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    """Tokens and log-probabilities of all requests, and what happened on the way. hard: in small chunks, with little memory, random
    arrivals and drafts of the right and of wrong tokens; otherwise each request alone."""
    random.seed(seed)
    with deterministic():
        world = replace(world, comm=TreeCommunicator() if world.world_size > 1 else Local())
        config = model_config(str(directory), None, world.world_size, quantize)
        model = checkpoint.load_model(str(directory), config, world, dtype)
        if not hard:
            found = [serve(Engine(model, None, EngineLimits(), world), [one])[one.request_id] for one in submits]
            return [bits(one) for one in found], {}
        size = PagedCache.bytes_per_block(model.attention_slots, 4, model.n_kv_heads, config.head_dim, dtype)
        limits = EngineLimits(block_size=4, max_batch_tokens=19, max_num_seqs=6, kv_memory=size * 17, draft_tokens=3)
        engine = Engine(model, None, limits, world)
        engine.speculation.costs = Costs({1: 1.0, 2: 1.0})
        found = list(serve(engine, submits, random.randint(1, 5)).values())
        met = {
            "preemptions": engine.scheduler.preemptions,
            "accepted": sum(one.accepted for one in engine.speculation.total.values()),
        }
        return [bits(one) for one in found], met | {"cached": sum(one.cached_tokens for one in found)}


def bits(answer: Answer) -> tuple[Any, ...]:
    return answer.tokens, answer.logprobs, answer.prompt_logprobs


@pytest.mark.parametrize(("place", "name"), list(enumerate(VARIANTS)))
def test_every_way_to_compute_a_request_gives_the_same_bits(
    place: int, name: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    from training.export import save_checkpoint

    quantize = in_turn([None, "int8", "fp8"], place) if name == "standard" else None
    dtype = in_turn([torch.float32, torch.bfloat16], place // 2)
    save_checkpoint(random_model(config_of(name)), tmp_path, torch.float32)
    submits = [
        msgspec.structs.replace(
            one, params=msgspec.structs.replace(one.params, logprobs=2, prompt_logprobs=random.choice([None, 1]))
        )
        for one in random_submits(5)
    ]
    alone, _ = answers_of(ALONE, tmp_path, submits, dtype, quantize, seed, hard=False)
    for one, (tokens, *_) in zip(submits[::2], alone[::2], strict=True):
        one.params.prediction.extend(tokens)  # drafts that are right
    for n in {1, in_turn([2, 4], place)}:
        results = ranks.run(n, answers_of, tmp_path, submits, dtype, quantize, seed, True)
        for rank, (found, met) in enumerate(results):
            assert found == alone, f"rank {rank} of {n}"
            assert met["preemptions"] and met["accepted"]

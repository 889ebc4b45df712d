"""Keys and values in 8 bits: a request gets the tokens of a model whose keys and values are rounded, however it is computed."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.core import Engine
from engine.limits import EngineLimits
from engine.paged_cache import CODES, PagedCache
from errors import UserError
from layers.attention import Causal, Heads
from model import Transformer
from tests.engine import test_engine
from tests.engine.test_engine import ALONE, TINY, assert_same, config_of, random_model, random_submits, serve
from tests.engine.test_runner import as_on_a_gpu
from tp import World

FLIPS = 0.02  # of logits, where fp32's rounding decides between two codes


def rounded(x: Tensor) -> Tensor:
    """x (…, D): e4m3 has 3 bits after the first; the smallest step is 2^-9, the largest value 448."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12).float() / 448
    units = x.float() / scale
    step = torch.exp2(units.abs().clamp(min=2**-6).log2().floor() - 3)
    return ((units / step).round() * step * scale).to(x.dtype)


class Rounded(Causal):
    def split(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().split(heads, qkv, frequencies)
        return q, rounded(k), rounded(v)


@pytest.fixture(autouse=True)
def _plain_model_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_engine, "Causal", Rounded)


def engine_of(model: Transformer, blocks: int, world: World = ALONE, **limits: Any) -> Engine:
    size = PagedCache.bytes_per_block(model.attention_slots, 4, model.n_kv_heads, model.config.head_dim, CODES)
    made = Engine(model, None, EngineLimits(**limits, block_size=4, kv_dtype="fp8", kv_memory=blocks * size), world)
    assert made.runner.cache.keys_values.dtype == CODES
    return made


@pytest.mark.parametrize("name", ["hybrid:2", "desync-2x:4-mistral"])
def test_chunks_batches_and_preemption_change_nothing(name: str, seed: int) -> None:
    """In fp64, where rounding does not decide between two codes."""
    model = random_model(config_of(name)).double()
    submits = random_submits(3)
    room, little = engine_of(model, 100, max_batch_tokens=7, max_num_seqs=5), engine_of(model, 15, max_batch_tokens=32)
    for made in (room, room, little):  # the second time, prompts are in the cache
        answers = serve(made, submits, 3)
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens)
    assert room.scheduler.prefix_hits > 0 and little.scheduler.preemptions > 0


def test_steps_as_on_a_gpu(seed: int) -> None:
    model, submits = random_model(config_of("parallel")), random_submits(4)
    with as_on_a_gpu():
        made = engine_of(model, 40, max_num_seqs=4, max_batch_tokens=30)
        answers = serve(made, submits, 2)
    for submit in submits:
        assert_same(model, submit, answers[submit.request_id].tokens, rounding=FLIPS)


def test_the_memory_holds_more_blocks() -> None:
    size, codes = (PagedCache.bytes_per_block(32, 16, 8, 128, dtype) for dtype in (torch.bfloat16, CODES))
    assert size / codes > 1.9
    slots, blocks, heads, features = random.randint(1, 3), random.randint(1, 5), random.randint(1, 4), 2 * random.randint(1, 9)
    cache = PagedCache(slots, blocks, 8, heads, features, torch.device("cpu"), CODES)
    assert cache.scales is not None
    assert cache.keys_values.nbytes + cache.scales.nbytes == blocks * cache.bytes_per_block(slots, 8, heads, features, CODES)
    cache.invent()
    assert cache.keys_values.float().isfinite().all()
    limits = EngineLimits(block_size=4, kv_memory=9000)
    model = random_model(config_of("standard"))
    found = [Engine(model, None, replace(limits, kv_dtype=kv), ALONE).scheduler.blocks.n_blocks for kv in ("auto", "fp8")]
    assert found[1] == found[0] * 2 or found[1] == found[0] * 2 + 1  # 16 bytes a token and head in fp32, or 4 + 4


def test_a_block_that_was_cleared_has_no_scale_that_is_not_finite() -> None:
    cache = PagedCache(2, 4, 8, 3, 6, torch.device("cpu"), CODES)
    cache.invent()
    assert cache.scales is not None
    cache.scales[:, :, 1:3] = torch.nan
    cache.clear(torch.tensor([1]))
    assert (cache.scales[:, :, 1] == 1).all() and not cache.keys_values[:, :, 1].float().any()
    assert cache.scales[:, :, 2].isnan().all() and cache.keys_values[:, :, 2].float().any()


def test_an_llm_has_the_option() -> None:
    llm = LLM(TINY, world=ALONE, kv_dtype="fp8")
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert llm._engine is not None and llm._engine[1].runner.cache.keys_values.dtype == CODES
    llm = LLM(TINY, world=ALONE, kv_dtype="int4")
    with pytest.raises(UserError, match=r"^unknown kv_dtype 'int4'; known: auto, fp8$"):
        llm.generate([[5, 6, 7]])

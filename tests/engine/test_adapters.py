"""The engine with adapters: each request of a mixed batch gets the tokens of the base with its adapter's weights merged, alone."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import comm
from checkpoint import load_model
from engine.adapters import Adapters
from engine.core import Engine, EngineLimits
from engine.drafts import Costs
from engine.protocol import Submit
from lora import LoraLimits
from presets import model_config
from tests.engine.test_engine import ALONE, assert_same, config_of, load, random_submits, serve
from tests.support.adapters import merged, write_adapter
from tests.test_tensor_parallel import save_random
from tp import World


def check_mixed_batches(folder: Path, device: str, name: str, rounding: float) -> None:
    base = save_random(replace(config_of(name), head_dim=16), folder / "base")
    adapters = {str(i): write_adapter(folder / str(i), base) for i in range(2)}
    models = {"": load(ALONE, base)} | {
        k: load(ALONE, merged(folder / f"merged-{k}", base, path)) for k, path in adapters.items()
    }
    world = World(0, 1, torch.device(device), comm.Local())
    model = load_model(str(base), model_config(str(base), None, 1), world, torch.float32)
    loaded = Adapters(model, LoraLimits(3, 9), world)
    loaded.load_now([(k, str(path)) for k, path in adapters.items()])
    size = 4 * 2 * model.attention_slots * model.n_kv_heads * model.config.head_dim * 4  # bytes of a block
    limits = EngineLimits(
        max_batch_tokens=24, max_num_seqs=5, kv_memory=30.5 * size, block_size=4, draft_tokens=random.choice([0, 3])
    )
    engine = Engine(model, None, limits, world, adapters=loaded)
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})  # what steps take must not decide what is tested
    prompts = random_submits(4)
    submits = [  # the same prompts for all, so that each finds only its own blocks in the cache
        Submit(f"{one.request_id}-{adapter}", one.prompt_ids, one.params, adapter=adapter)
        for one in prompts
        for adapter in models
    ]
    for order in (submits, submits[::-1]):
        answers = serve(engine, order, 2)
        for submit in submits:
            assert_same(models[submit.adapter], submit, answers[submit.request_id].tokens, rounding)


@pytest.mark.parametrize("name", ["hybrid:2", "parallel"])
def test_mixed_batches(name: str, tmp_path: Path, seed: int) -> None:
    check_mixed_batches(tmp_path, "cpu", name, 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["hybrid:2", "parallel", "desync-2x:4"])
def test_mixed_batches_on_a_gpu(name: str, tmp_path: Path, seed: int) -> None:
    check_mixed_batches(tmp_path, "cuda", name, 1e-4)

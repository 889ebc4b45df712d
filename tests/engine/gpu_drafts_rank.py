"""One rank of test_gpu.py: embedded models with drafts by heads and models, whole or split over the ranks, by every communicator. One
JSON line each from rank 0. Arguments: the communicators."""

import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from checkpoints import eagle
from checkpoints.eagle import EagleHead
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import run
from comms.registry import choose
from engine import SamplingParams, draft_models
from engine.core import Engine
from engine.draft_costs import Costs
from engine.limits import EngineLimits
from engine.protocol import Submit
from tests import MODELS
from tests.engine.test_engine import ALONE, assert_same, load, serve
from text.tokenizer_files import load_tokenizer
from tp import World, init_world

DRAFTS = {
    "standard": ("tiny-standard/draft", "tiny-parallel"),
    "ladder": ("tiny-ladder/draft",),
    "hybrid": ("tiny-hybrid/draft",),
}
PROMPTS, NEW_TOKENS = ("Once upon a time there was", "The dog", "One day a little girl found a red box."), 40


def submits_of(name: str) -> list[Submit]:
    """Greedy requests of different lengths, so that their drafts have different lengths at the end."""
    tokenizer = load_tokenizer(MODELS / f"tiny-{name}")
    return [
        Submit(str(i), tokenizer.encode(prompt), SamplingParams(max_tokens=NEW_TOKENS - 7 * i, temperature=0))
        for i, prompt in enumerate(PROMPTS)
    ]


def answers(there: World, communicator: str, names: Collection[str] = tuple(DRAFTS)) -> Iterator[dict[str, Any]]:
    """The answers of these models with each draft. communicator: its name."""
    for name in names:
        path = str(MODELS / f"tiny-{name}")
        config = model_config(path, None, there.world_size)
        model = load_model(path, config, there, torch.float32)
        for draft, split in ((draft, split) for draft in DRAFTS[name] for split in (False, True)):
            least = 0 if split else 1 << 40  # bytes from which a draft model is split
            with patch.object(eagle, "SHARED_BYTES", least), patch.object(draft_models, "REPLICATED", least):
                found = draft_models.find_draft(str(MODELS / draft), None, config, None, there.world_size)
                assert found is not None
                drafting = found.load(there, torch.float32)
            assert (drafting.comm.world_size > 1) == split
            limits = EngineLimits(256, max_num_seqs=4, max_batch_tokens=64, kv_memory=2e7, draft_tokens=4)
            engine = Engine(model, None, limits, there, drafting)
            engine.speculation.costs = Costs({1: 1.0, 2: 1.0})  # what steps take must not decide what is tested
            served = {key: answer.tokens for key, answer in serve(engine, submits_of(name)).items()}
            total = engine.speculation.total["head" if isinstance(drafting, EagleHead) else "model"]
            yield {
                "model": name,
                "comm": communicator,
                "draft": draft,
                "split": split,
                "tokens": served,
                "drafted": total.tokens,
                "accepted": total.accepted,
            }


def check(found: list[dict[str, Any]], rounding: float) -> None:
    """Compare what `answers` found with the models on one CPU rank without a cache."""
    for name in {line["model"] for line in found}:
        model, submits = load(ALONE, MODELS / f"tiny-{name}"), submits_of(name)
        for line in [line for line in found if line["model"] == name]:
            assert line["accepted"] > 20, line
            for submit in submits:
                assert_same(model, submit, line["tokens"][submit.request_id], rounding)


def main() -> None:
    world = init_world("cuda", "nccl")
    for communicator in sys.argv[1:]:
        for found in answers(replace(world, comm=choose("cuda", communicator).build()), communicator):
            everyones = [found] * world.world_size
            dist.all_gather_object(everyones, found, group=world.control)
            assert all(other == found for other in everyones), f"the ranks disagree: {everyones}"
            if world.rank == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run(main)

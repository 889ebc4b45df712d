"""One rank of test_gpu.py: every embedded model by every communicator, one JSON line each from rank 0. Arguments: the
communicators, all of them if there is none."""

import json
import sys
from dataclasses import replace

import torch

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import run
from comms.registry import choose
from engine import LLM, SamplingParams
from tests import MODELS
from text.tokenizer_files import load_tokenizer
from tp import init_world

EMBEDDED = ("standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x")
COMMUNICATORS = ("nccl", "one-shot", "two-shot", "auto")
PROMPT, NEW_TOKENS = "Once upon a time there was", 60


def main() -> None:
    world = init_world("cuda", "nccl")
    for communicator in sys.argv[1:] or COMMUNICATORS:
        there = replace(world, comm=choose("cuda", communicator).build())
        for name in EMBEDDED:
            path = MODELS / f"tiny-{name}"
            model = load_model(str(path), model_config(str(path), None, world.world_size), there, torch.float32)
            prompt = load_tokenizer(path).encode(PROMPT)
            greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
            tokens = LLM(model, world=there).generate([prompt], greedy)[0].token_ids
            if world.rank == 0:
                print(json.dumps({"model": name, "comm": communicator, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    run(main)

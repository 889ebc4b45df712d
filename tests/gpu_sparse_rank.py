"""A rank of test_sparse.py's GPU tests: greedy tokens of a checkpoint in fp32, with graphs and chunks. Rank 0 prints them as JSON.

Arguments: the checkpoint, and prompts as JSON."""

import json
import sys

import torch

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import run
from engine import LLM, SamplingParams
from engine.limits import EngineLimits
from tp import init_world

NEW_TOKENS = 8


def main() -> None:
    path, prompts = sys.argv[1], json.loads(sys.argv[2])
    world = init_world("cuda")
    model = load_model(path, model_config(path, None, world.world_size), world, torch.float32)
    limits = EngineLimits(max_model_len=512, max_num_seqs=len(prompts), max_batch_tokens=160, kv_memory=1e8)
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    answers = LLM(model, world=world, limits=limits).generate(prompts, greedy)
    if world.rank == 0:
        print(json.dumps([answer.token_ids for answer in answers]), flush=True)


if __name__ == "__main__":
    run(main)

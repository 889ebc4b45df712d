"""One rank of test_gpu.py: the embedded ladder and hybrid with each schedule and some communicators, one JSON line each from every
rank. The argument and the rank are the path of a rank's file."""

import json
import sys
from dataclasses import replace

import msgspec
import torch

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import run
from comms.registry import choose
from engine import LLM, SamplingParams
from engine.limits import EngineLimits
from options import OVERLAPS
from tests import MODELS
from tests.engine.gpu_rank import NEW_TOKENS, PROMPT
from text.tokenizer_files import load_tokenizer
from tp import init_world

MODELS_WITH_LADDERS = ("ladder", "hybrid")
COMMUNICATORS = ("nccl", "one-shot", "two-shot", "fused")
REPLAYS = 500  # of each decode graph, of 17 all-reduces
ROWS = 4  # of these replays


def main() -> None:
    from comms.fused import FusedCommunicator  # needs Triton, and a test without a GPU imports this file

    world = init_world("cuda", "nccl")
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with open(f"{sys.argv[1]}{world.rank}", "w") as out:
        for communicator in COMMUNICATORS:
            there = replace(world, comm=choose("cuda", communicator).build())
            if isinstance(there.comm, FusedCommunicator):
                there.comm.measure = None  # takes long, and could choose not to fuse
            for name in MODELS_WITH_LADDERS:
                path = MODELS / f"tiny-{name}"
                model = load_model(str(path), model_config(str(path), None, world.world_size), there, torch.float32)
                prompt = load_tokenizer(path).encode(PROMPT)
                for overlap in OVERLAPS:
                    limits = EngineLimits(256, max_num_seqs=ROWS, max_batch_tokens=256, kv_memory=1e7)
                    llm = LLM(model, world=replace(there, overlap=overlap), limits=limits)
                    # prompts of one step, which is long enough to be fused, and decode steps of all rows
                    llm.generate([prompt * 8] * ROWS, msgspec.structs.replace(greedy, max_tokens=4))
                    runner = llm._engine[1].runner  # type: ignore[index]
                    runner.decode.clear()
                    for _ in range(REPLAYS):
                        runner.graphs.replay(("decode", ROWS))  # type: ignore[union-attr]
                    there.comm.check()
                    tokens = llm.generate([prompt], greedy)[0].token_ids
                    found = {"model": name, "comm": communicator, "overlap": overlap, "tokens": tokens}
                    out.write(json.dumps(found | {"chosen": runner.schedules.chosen}) + "\n")


if __name__ == "__main__":
    run(main)

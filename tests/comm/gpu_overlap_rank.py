"""One rank of test_on_gpus.py. Rank 0 computes a layer before any other rank begins it, so none of its all-reduces can
complete. If the layer's modules finish, they do not wait for them. Rank 0 prints one JSON line for each case.

Arguments: communicators.
"""

import json
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from checkpoints.presets import PRESETS
from checkpoints.weights import load_model
from cli import run
from comms import Residual
from comms.registry import choose
from config import with_variant
from layers.attention import Causal
from model import Transformer
from tp import World, init_world

VARIANTS = ("standard", "ladder", "hybrid:2")
ROWS = 16
SOON = 1.0  # seconds; a layer takes a millisecond
LATE = 20.0


def alone(model: Transformer, layer: int, x: torch.Tensor, world: World, together: bool) -> tuple[bool, torch.Tensor]:
    """Compute one layer. Returns whether rank 0 finished its modules before the others began, and the stream after it."""
    if world.rank and not together:
        dist.barrier(world.control)
    done = torch.cuda.Event()
    stream = model.layers[layer](Residual(x, model.comm), model.frequencies, Causal(ROWS, world.device))
    done.record()
    over = False
    if not world.rank and not together:
        ladder = layer in model.config.ladder_layers
        deadline = time.monotonic() + (LATE if ladder else SOON)
        while not over and time.monotonic() < deadline:
            over = done.query()
        dist.barrier(world.control)
    return over, stream.finish()


@torch.inference_mode()
def main() -> None:
    world = init_world("cuda", "nccl")
    for name in sys.argv[1:]:
        there = replace(world, comm=choose("cuda", name).build())
        for variant in VARIANTS:
            config = with_variant(PRESETS["tiny"], variant)
            model = load_model("tiny", config, there, torch.bfloat16, seed=0)
            x = torch.randn(1, ROWS, config.hidden_size, device=world.device, dtype=torch.bfloat16)
            dist.broadcast(x, 0)
            for layer in (0, config.n_layers - 1):
                _, expected = alone(model, layer, x, world, together=True)
                torch.cuda.synchronize()
                over, got = alone(model, layer, x, world, together=False)
                there.comm.check()
                if world.rank == 0:
                    found = {"comm": name, "variant": variant, "layer": layer, "over": over, "same": torch.equal(got, expected)}
                    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

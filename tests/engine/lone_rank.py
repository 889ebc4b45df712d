"""Rank 1 stops in the middle of an answer: what rank 0 hands out then. As a program, on GPUs. Argument: the communicator."""

import sys
from dataclasses import replace
from typing import Any

import torch

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import run
from comms.registry import choose
from engine.core import Engine
from engine.limits import EngineLimits
from engine.protocol import SamplingParams, Submit
from tests import MODELS
from tp import World, init_world

TOKENS, TOGETHER = 12, 4  # of the answer, and those before rank 1 stops


def wait_briefly(communicator: Any, polls: int) -> None:
    """Let kernels that are launched or captured from now on give up after so many polls."""
    kernels = filter(None, (communicator.blocking, communicator.overlapped, communicator.few_sms))
    for workspace in (communicator.gathers, *(kernel.workspace for kernel in kernels)):
        workspace.exchange = replace(workspace.exchange, max_polls=polls)


def hand_out(world: World, communicator: Any, model: str = "tiny-ladder") -> tuple[list[int], list[int], str]:
    """On rank 0: the tokens of an answer, those that it hands out if rank 1 stops meanwhile, and its error then."""
    world = replace(world, comm=communicator)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        wait_briefly(communicator, 1 << 21)  # a second or more
    path = str(MODELS / model)
    loaded = load_model(path, model_config(path, None, world.world_size), world, torch.float32)
    limits = EngineLimits(max_model_len=32, max_num_seqs=2, max_batch_tokens=16, kv_memory=1e6)
    engine = Engine(loaded, None, limits, world)
    engine.capture()
    params, given = SamplingParams(max_tokens=TOKENS, temperature=0), list[list[int]]()
    for name in ("together", "alone"):
        engine.submit(Submit(name, [1, 2, 3], params))
        given.append([])
        while engine.has_work():
            if name == "alone" and len(given[-1]) == TOGETHER:
                if world.rank:
                    return [], [], ""
                if not on_gpu:
                    wait_briefly(communicator, 20)
            try:
                given[-1] += [token for output in engine.step() for token in output.token_ids]
            except RuntimeError as error:
                return given[0], given[1], str(error)
    return given[0], given[1], "no error"


def hand_out_on_cpu(world: World) -> tuple[list[int], list[int], str]:
    from tests.support.sums import symmetric  # needs Triton

    return hand_out(world, symmetric("one-shot"))


def check(given: list[int], alone: list[int], error: str) -> None:
    assert "rank 0 timed out" in error
    assert len(given) == TOKENS
    assert TOGETHER <= len(alone) < TOKENS and alone == given[: len(alone)]


def main() -> None:
    world = init_world("cuda", "nccl")
    found = hand_out(world, choose("cuda", sys.argv[1]).build())
    if world.rank == 0:
        check(*found)
    torch.distributed.barrier(world.control)  # rank 1 stays, as one that hangs does


if __name__ == "__main__":
    run(main)

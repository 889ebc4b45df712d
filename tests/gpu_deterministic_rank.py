"""One rank of a test in test_deterministic.py, with --deterministic on GPUs: all-reduces against the definition of the tree, the
engine's answers, and the forward pass of training. Rank 0 prints a JSON line with what is wrong, and the answers.

Arguments: a seed, and checkpoints, PATH or PATH,WIDTH to quantize one while loading it."""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import run
from comms import Communicator, Local
from comms.interface import SCHEDULES
from comms.registry import choose
from engine import LLM
from engine.limits import EngineLimits
from engine.schedules import Graphs
from kernels import determinism
from kernels.norm import add_rms_norm
from kernels.sampling import log_softmax
from layers.attention import Causal
from tests.test_deterministic import requests, trained, tree_of
from tp import World, init_world
from training.batches import IGNORED, Batch

COMMUNICATORS = ("nccl", "one-shot", "two-shot", "auto")
# of messages: of every kernel and collective
BYTES = (2, 2002, 64 << 10, (64 << 10) + 16, 400_000, 1 << 20, 10_000_000, 15 << 20)
ROWS = (8, 512, 640, 4096, 5120, 8192)  # values of a row that is normalized


def wrong_sums(world: World, comm: Communicator, name: str) -> list[str]:
    """Messages whose sum, or whose norm after an addition, has other bits than the definition's: eager, and in a graph's replays."""
    found, graphs = [], Graphs(world.device)
    for size in BYTES:
        for dtype in (torch.bfloat16, random.choice([torch.float16, torch.float32])):
            values = max(1, size // dtype.itemsize)
            overlap, schedule = random.random() < 0.5, random.choice(SCHEDULES)
            comm.use(schedule)
            row = random.choice([row for row in ROWS if values % row == 0] or [values])
            shape = (values // row, row)
            own = torch.empty(shape, dtype=dtype, device=world.device)
            x, weight = (torch.randn(s).to(world.device, dtype) for s in (shape, shape[-1:]))

            def step(
                own: Tensor = own, x: Tensor = x, weight: Tensor = weight, overlap: bool = overlap
            ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                total = comm.begin_all_reduce(own.clone(), overlap).wait()
                return total, comm.begin_all_reduce(own.clone(), overlap).add_norm(x, weight, 1e-5)

            case = f"{name}: {values} of {dtype}, {overlap=}, {schedule}"
            found += [f"{case}, eager"] if not right(world, own, x, weight, step) else []
            captured = graphs.capture(step)

            def again(replay: Callable[[], object] = captured.replay, output: Any = captured.output) -> Any:
                replay()
                return output

            found += [f"{case}, replay {i}" for i in range(2) if not right(world, own, x, weight, again)]
    comm.check()
    return found


def right(world: World, own: Tensor, x: Tensor, weight: Tensor, step: Callable[[], Any]) -> bool:
    """Whether a step has the definition's bits for new partial sums, the same on all ranks but for this one's part."""
    sizes = torch.exp2(torch.randint(-6, 6, (world.world_size, *own.shape)).float())
    partials = (torch.randn(world.world_size, *own.shape) * sizes).to(own.dtype)
    own.copy_(partials[world.rank])
    total, (added, normed) = step()
    expected = tree_of(list(partials)).to(world.device)
    wanted = add_rms_norm(x, expected, weight, 1e-5)
    return all(map(torch.equal, (total, added, normed), (expected, *wanted)))


@torch.inference_mode()
def answers(world: World, path: str, quantize: str | None, seed: int) -> list[Any]:
    """The tokens and log-probabilities of `requests`, in chunks and together."""
    model = load_model(path, model_config(path, None, world.world_size, quantize), world, torch.bfloat16)
    prompts, params = requests(seed)
    limits = EngineLimits(max_model_len=80, max_num_seqs=8, max_batch_tokens=random.randint(11, 60), kv_memory=1e8)
    found = LLM(model, None, world, limits=limits).generate(prompts, params)
    return [[one.token_ids, [position.chosen.logprob for position in one.logprobs]] for one in found]


def is_same_in_training(world: World, path: str) -> bool:
    """Whether the loss of one token, of a model whose states the ranks share, has the bits of inference."""
    alone = replace(world, rank=0, world_size=1, comm=Local(), control=None)
    model = load_model(path, model_config(path, None, 1), alone, torch.bfloat16)
    tokens = torch.randint(101, (3, random.randint(2, 70)))
    targets, row, column = torch.full_like(tokens, IGNORED), random.randrange(3), random.randrange(tokens.shape[1])
    targets[row, column] = random.randrange(101)
    batch = Batch(tokens, targets).to(world.device)
    with torch.inference_mode():
        logits = model(batch.inputs[row : row + 1, : column + 1], Causal(column + 1, world.device))[0, -1:]
        expected = -log_softmax(logits)[0, targets[row, column]]
    loss, _ = trained(world, model, batch, random.choice([1, 5, 100]), random.random() < 0.5, True)
    determinism.enable()
    return torch.equal(loss, expected)


def seed_all(seed: str) -> None:
    random.seed(seed)
    torch.manual_seed(int(seed))


def main() -> None:
    seed, *checkpoints = sys.argv[1:]
    world = init_world("cuda", "nccl", deterministic=True)
    comms: dict[str, Communicator] = {"local": world.comm}
    if world.world_size > 1:
        comms = {name: choose("cuda", name).build() for name in COMMUNICATORS}
    seed_all(seed)
    wrong, found = [], {}
    with torch.inference_mode():
        for name, comm in comms.items() if world.world_size > 1 else ():
            wrong += wrong_sums(world, comm, name)
    for i, checkpoint in enumerate(checkpoints):
        path, _, width = checkpoint.partition(",")
        seed_all(f"{seed}{i}")
        there = replace(world, comm=list(comms.values())[i % len(comms)], overlap=random.choice(SCHEDULES))
        found[Path(path).name] = answers(there, path, width or None, int(seed))
        if not width and not is_same_in_training(world, path):
            wrong.append(f"training of {path}")
    if world.rank == 0:
        kinds = {name: type(comm).__name__ for name, comm in comms.items()}
        print(json.dumps({"wrong": wrong, "answers": found, "communicators": kinds}), flush=True)


if __name__ == "__main__":
    run(main)

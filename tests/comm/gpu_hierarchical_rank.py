"""One rank of test_on_gpus.py. Half of the ranks say that they are on another host. Rank 0 prints one JSON line for each
case: the largest error of all ranks, relative to the largest sum if that is above 1, and whether all ranks have the same bits.

Arguments: a communicator and a seed.
"""

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from cli import run
from comms.hierarchical import HOST_ID
from comms.registry import choose
from tp import World, init_world

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REPLAYS, ROUNDS = 20, 50


def partials(shape: tuple[int, ...], dtype: torch.dtype, world: World, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """This rank's partial sum, and the sum of all in fp64. generator: on CPU, with the same state on all ranks."""
    all_ranks = torch.randn(world.world_size, *shape, generator=generator).to(dtype)
    return all_ranks[world.rank].to(world.device), all_ranks.double().sum(0).to(world.device)


def report(case: str, found: Tensor, expected: Tensor, world: World) -> None:
    """Print how far `found` is from `expected`. Collective."""
    torch.cuda.synchronize()
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    first = found.clone(memory_format=torch.contiguous_format)  # a gathered tensor's is none that can be sent
    dist.broadcast(first, 0)
    same = torch.tensor(float(torch.equal(first, found)), device=world.device)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    if world.rank == 0:
        line = {"case": case, "dtype": str(found.dtype).removeprefix("torch."), "error": error.item(), "same": bool(same)}
        print(json.dumps(line), flush=True)


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    step()  # connects the groups
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    return graph, result


@torch.inference_mode()
def main() -> None:
    name, seed = sys.argv[1], int(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ[HOST_ID] = f"host-{rank * 2 // size}"
    world = init_world("cuda", "nccl")
    comm = choose("cuda", name).build()
    generator = torch.Generator().manual_seed(seed)
    odd = int(torch.randint(1, 100_000, (1,), generator=generator))
    for dtype in DTYPES:  # all in flight before the first is read, beside an all-gather of all ranks
        pairs = [partials(shape, dtype, world, generator) for shape in ((1,), (3, 7), (64, 8192), (odd,))]
        pending = [comm.begin_all_reduce(partial.clone(), overlap=True) for partial, _ in pairs]
        gathered = comm.all_gather(torch.full((2, 1), float(rank), device=world.device))
        for one, (_, expected) in zip(pending, pairs, strict=True):
            report("sum", one.wait(), expected, world)
        report("all-gather", gathered, torch.arange(size, device=world.device).double().expand(2, size), world)

    source, _ = partials((16, 8192), torch.bfloat16, world, generator)

    def step() -> Tensor:
        """An all-reduce, and beside it an all-gather, whose result is added."""
        pending = comm.begin_all_reduce(source.clone(), overlap=True)
        gathered = comm.all_gather(source[:, :1].contiguous())
        return pending.wait() + gathered.sum(-1, keepdim=True)

    graph, result = captured(step)
    for _ in range(REPLAYS):
        partial, expected = partials((16, 8192), torch.bfloat16, world, generator)
        source.copy_(partial)
        graph.replay()
    report("graph", result, expected + expected[:, :1], world)
    del graph  # NCCL's communicators cannot end while a graph with their collectives exists

    for _ in range(ROUNDS):  # without a host that waits: neither group may block the other
        pending = comm.begin_all_reduce(source.clone(), overlap=True)
        gathered = comm.all_gather(source)
        total = pending.wait()
    report("beside", torch.cat([total.flatten(), gathered.unflatten(-1, (size, -1)).sum(-2).flatten()]), torch.cat([expected.flatten()] * 2), world)  # fmt: skip
    if world.rank == 0:
        print(json.dumps({"comm": type(comm).__name__}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

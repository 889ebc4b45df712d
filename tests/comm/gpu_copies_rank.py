"""One rank of test_copy_engines.py: replays of all-reduces by copy engines beside GEMMs, with fresh inputs. The argument and the rank are
the path of its file: a JSON line for each case, with the number of wrong values and of copies between GPUs."""

import json
import sys
from time import perf_counter

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from cli import run
from comms.interface import LEAST_COPIED
from comms.symmetric import COPIED, SymmetricCommunicator
from tp import World, init_world

CASES = ((LEAST_COPIED, torch.bfloat16), (16 << 20, torch.bfloat16), (COPIED + 12344, torch.float16), (32 << 20, torch.float32))
ROUNDS, EACH = 5, 40


def case(world: World, comm: SymmetricCommunicator, size: int, dtype: torch.dtype) -> dict[str, object]:
    values, generator = size // dtype.itemsize, torch.Generator("cuda").manual_seed(size)
    partial, expected = (torch.empty(values, dtype=dtype, device="cuda") for _ in range(2))
    a, wrong = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), torch.zeros((), dtype=torch.int64, device="cuda")

    def refresh() -> None:
        parts = torch.randn(world.world_size, values, generator=generator, device="cuda").to(dtype)
        partial.copy_(parts[world.rank])
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        expected.copy_(total)

    def step() -> None:
        pending = comm.begin_all_reduce(partial, overlap=True)
        for _ in range(3):
            a @ a
        wrong.add_((pending.wait() != expected).sum())

    refresh()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(ROUNDS):
        refresh()
        for _ in range(EACH):
            graph.replay()
    torch.cuda.synchronize()
    seconds = (perf_counter() - start) / ROUNDS / EACH
    # to each other rank a part and two flags, and from each its sum; how such a copy is called depends on how the memory is mapped
    copies = [event.name for event in trace.events() if event.name.startswith("Memcpy")]
    needed = 4 * (world.world_size - 1) * -(-size // COPIED)
    found = {
        "bytes": size,
        "dtype": str(dtype),
        "wrong": int(wrong),
        "copies": len(copies),
        "needed": needed,
        "names": sorted(set(copies)),
    }
    return found | {"us_of_a_step": round(seconds * 1e6, 1)}


@torch.inference_mode()
def main() -> None:
    world = init_world("cuda", "nccl")
    comm = SymmetricCommunicator("two-shot", world.device)
    comm.use("copy-engines")
    with open(f"{sys.argv[1]}{world.rank}", "w") as out:
        for size, dtype in CASES:
            out.write(json.dumps(case(world, comm, size, dtype)) + "\n")
            comm.check()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

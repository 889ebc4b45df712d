"""A rank of test_gpu.py: trains over NCCL, and fails if the weights or the trace are not as they should be. Argument: a seed."""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from checkpoints.presets import preset
from cli import run
from engine.profiling import Span, intersection, length, read_trace, span_of, union
from tests.training.test_executor import SCHEDULE, Run, assert_close, plain, sharded
from tp import World, init_world
from training.batches import Batch
from training.executor import Execution, Executor
from training.initialize import empty_model, materializer
from training.losses import cross_entropy
from training.optimizer import AdamSettings, Optimizer
from training.sharding import OVERLAPS, Mesh, Sharding

AGAIN = Execution(bucket_bytes=3000, recompute=True)
WINDOWS, LENGTH = 4, 2048  # of the large model, a rank's


def cases(ranks: int) -> list[tuple[tuple[int, ...], Execution]]:
    """The meshes of P, G and OS on one node, and how a step is run."""
    meshes = [
        (1, 1, ranks),
        (ranks, ranks, ranks),
        (1, ranks, ranks),
        *([(2, 2, 4), (1, 2, 2), (2, 2, 2)] if ranks == 4 else []),
    ]
    return [
        *((mesh, AGAIN) for mesh in meshes),
        ((1, 1, ranks), replace(AGAIN, intra_tensor=True)),
        ((ranks // 2, ranks, ranks), replace(AGAIN, recompute=False)),
        ((ranks // 2, ranks // 2, ranks), replace(AGAIN, compile=True)),
    ]


def check_weights(world: World, seed: int) -> None:
    """In fp32 they are those of training on one GPU. In bf16 they are bitwise equal on all ranks."""
    for meshes, execution in cases(world.world_size):
        sharding = Sharding(*map(Mesh, meshes))
        run = Run("standard", Mesh(world.world_size), sharding, 2, execution, seed % 1000, steps=10)
        assert_close(sharded(world, run)[1], plain(run, world.device)[1], 1e-4, run)
        half = replace(run, dtype=torch.bfloat16)
        weights, start = sharded(world, half)[1], plain(replace(half, steps=0), world.device)[1]
        for name, weight in weights.items():
            assert weight.dim() == 1 or (weight != start[name]).any(), f"{name} was not trained under {run}"
            first = weight.clone()
            dist.broadcast(first, 0)
            assert torch.equal(weight, first), f"{name} differs between replicas under {run}"


# --- overlap --------------------------------------------------------------------------------------------------------------


def kernels(step: Callable[[], object]) -> tuple[list[Span], list[Span]]:
    """Profile two steps after a warm-up step. Returns the spans (µs) of all-gathers by NCCL, and of all kernels but NCCL's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
        ) as recorder:
            for number in range(3):
                step()
                if number in (0, 2):
                    torch.cuda.synchronize()  # so that the trace has nothing of the first step and all of the last
                recorder.step()
        events = [event for event in read_trace(path)["traceEvents"] if event.get("cat") == "kernel"]
    gathers = [span_of(event) for event in events if event["name"].startswith("nccl") and "AllGather" in event["name"]]
    return gathers, [span_of(event) for event in events if not event["name"].startswith("nccl")]


def hidden_share(world: World, overlap: frozenset[str], seed: int) -> float:
    """The share of the all-gather kernels' time in which any kernel other than NCCL's runs, with all states of a model sharded: the
    smallest of the ranks' with overlap, and the largest without."""
    heads = dict(n_heads=16, n_kv_heads=16, head_dim=128)
    sizes = dict(hidden_size=2048, n_layers=6, intermediate_size=5632, vocab_size=512, max_seq_len=LENGTH, **heads)
    model = empty_model(replace(preset("tiny"), **sizes), world.device, torch.bfloat16)  # type: ignore[arg-type]
    every = Mesh(world.world_size)
    fill = materializer(model, None, seed)
    executor = Executor(model, fill, world.rank, Sharding(every, every, every), every, Execution(overlap=overlap))
    optimizer = Optimizer(executor.weights, executor.vectors, executor.groups.copy, AdamSettings())
    tokens = torch.randint(0, 512, (WINDOWS, LENGTH + 1), device=world.device)
    batch = Batch(tokens[:, :-1], tokens[:, 1:])

    def step() -> None:
        loss = cross_entropy(model, executor.forward(batch.inputs), batch) / (world.world_size * WINDOWS * LENGTH)
        executor.backward(loss, last=True)
        optimizer.step(executor.take_gradients(), SCHEDULE.rate(0))
        if not overlap:
            executor.synchronize()

    for _ in range(3):
        step()
    dist.barrier()
    gathers, computation = kernels(step)
    executor.close()
    assert gathers, "there is no all-gather in the trace"
    share = torch.tensor(length(intersection(union(gathers), union(computation))) / length(union(gathers)), device=world.device)
    dist.all_reduce(share, dist.ReduceOp.MIN if overlap else dist.ReduceOp.MAX)  # the worst rank's
    return share.item()


def main() -> None:
    seed = int(sys.argv[1])
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which some machines must not use
    torch.backends.cuda.matmul.allow_tf32 = False
    world = init_world("cuda", "nccl")
    check_weights(world, seed)
    hidden, alone = (hidden_share(world, overlap, seed) for overlap in (frozenset(OVERLAPS), frozenset[str]()))
    assert hidden > 0.3 and alone < 0.1, f"of all-gathers, {hidden:.0%} are hidden, and {alone:.0%} without overlap"


if __name__ == "__main__":
    run(main)

"""One rank of `make bench-training`: it trains a few steps with one system, and rank 0 writes the measurements as JSON.

    python launch.py --ranks 2 -m scripts.bench.training.rank --model tiny --data random.bin --system zero-3 \
        --steps 8 --unmeasured 3 --sequence-length 128 --global-batch 4 --result row.json

With --links it measures the ranks' collectives for the planner instead. With --only-trace it only records a trace. The other
options are those of python -m training.train.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, schedule

from checkpoints.presets import preset
from cli import Parser, run
from config import ModelConfig
from engine.profiling import Span, intersection, length, read_trace, span_of, union
from errors import UserError
from scripts.bench.training.fsdp2 import PREFETCH, Fsdp2Trainer, prefetch, shard
from tp import World, init_world
from training import profile_collectives
from training.batches import GlobalBatches
from training.loop import Setup, build_trainer, together
from training.losses import cross_entropy
from training.options import adam_of, add_batch_options, add_execution_options, dtype_of, ranks_mesh, schedule_of
from training.planner.collectives import write_profile
from training.planner.cost import forward_flops, predict
from training.planner.search import alternatives, choose
from training.sharding import Mesh, Sharding
from training.sharding_choice import Planned, plan, workload_of
from training.step import Trainer, check_batch
from training.token_file import open_tokens

SYSTEMS = {
    "planner": "planner's choice",
    "planner-paper": "planner's, by communication",
    "zero-1": "ZeRO-1",
    "zero-2": "ZeRO-2",
    "zero-3": "ZeRO-3",
    "mics": "MiCS",
    "fsdp2": "FSDP2",
    "fsdp2-late": "FSDP2, one sum a step",
    "fsdp2-hsdp": "FSDP2, HSDP",
}
TRACED = 3  # steps
TUNING = 3  # steps with each depth of prefetching; the first one is not counted


def add_trace_and_tuning_options(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of steps in a trace and for tuning, which are in addition to --steps."""
    parser.add_argument(
        "--traced", type=int, default=TRACED, metavar="STEPS", help=f"steps in a trace (default: {TRACED}; 0: no trace)"
    )
    parser.add_argument(
        "--tuning",
        type=int,
        default=TUNING,
        metavar="STEPS",
        help=f"steps of FSDP2 with each prefetching depth, to choose the fastest (default: {TUNING}; 0: FSDP2's default order)",
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="PRESET", help="the model, with random weights")
    parser.add_argument("--system", choices=SYSTEMS, required=True, help="what to measure; only `planner` reads --sharding")
    parser.add_argument("--result", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--unmeasured", type=int, required=True, metavar="N", help="how many of the first --steps are not measured"
    )
    parser.add_argument("--two-nodes", action="store_true", help="make NCCL treat the two halves of the ranks as two hosts")
    parser.add_argument("--links", action="store_true", help="measure the collectives instead of training")
    parser.add_argument("--only-trace", action="store_true", help="record a trace and measure no times")
    add_trace_and_tuning_options(parser)
    add_batch_options(parser, learning_rate=1e-5)
    add_execution_options(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.unmeasured < args.steps:
        raise UserError(f"--unmeasured must be from 1 to {args.steps - 1}, below --steps, not {args.unmeasured}")
    if args.deterministic:
        raise UserError("--deterministic is not measured here; leave it out")
    return args


def separate_hosts(rank: int, gpus_per_node: int) -> None:
    """Make NCCL treat each node's ranks as a separate host, so that the nodes are connected by sockets over loopback, and neither
    by NVLink nor by shared memory. Must be called before NCCL starts."""
    os.environ["NCCL_HOSTID"] = f"node-{rank // gpus_per_node}"
    os.environ.update(NCCL_NET="Socket", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")


# --- building the trainers ------------------------------------------------------------------------------------------------


def planned(args: argparse.Namespace, config: ModelConfig, mesh: Mesh, device: torch.device) -> Planned:
    """The sharding of a system of our executor, with its predicted step time if the cluster is known."""
    if args.system == "planner":
        return plan(args, config, mesh, device)
    one, workload = Mesh(), workload_of(args, config, mesh, device)
    if args.system in ("mics", "planner-paper"):
        if workload is None:  # the figures of this CPU are unknown
            return plan(args, config, mesh, device) if args.system == "planner-paper" else _whole_nodes(mesh)
        cuda = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory if cuda else workload.cluster.memory_gb * 1e9
        if args.system == "planner-paper":
            sharding = choose(workload, memory, "communication")[0].sharding
        else:
            sharding = next(a.plan.sharding for a in alternatives(workload, memory, "communication") if a.name == "MiCS")
    else:
        sharding = {
            "zero-1": Sharding(one, one, mesh),
            "zero-2": Sharding(one, mesh, mesh),
            "zero-3": Sharding(mesh, mesh, mesh),
        }[args.system]
    return Planned(sharding, SYSTEMS[args.system], None if workload is None else predict(workload, sharding).step_seconds)


def _whole_nodes(mesh: Mesh) -> Planned:
    return Planned(Sharding(*[Mesh(mesh.gpus)] * 3), SYSTEMS["mics"])


def copies(system: str, mesh: Mesh) -> tuple[int, ...]:
    """The shape of FSDP2's device mesh: (ranks,), or (copies, ranks of a copy) for HSDP.

    A copy is a node, or half of the node if there is only one. Raises UserError.
    """
    if system != "fsdp2-hsdp":
        return (mesh.size,)
    nodes = mesh.nodes if mesh.nodes > 1 else 2
    if mesh.size % nodes:
        raise UserError(f"HSDP needs ranks for {nodes} copies; start an even number")
    return (nodes, mesh.size // nodes)


def build_fsdp2(
    args: argparse.Namespace, config: ModelConfig, world: World, batches: GlobalBatches, shape: tuple[int, ...]
) -> Fsdp2Trainer:
    names = ("copies", "shards")[-len(shape) :]
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    dtype = dtype_of(args, world.device)
    whole = shard(config, world.device, mesh, dtype, args.recompute, args.compile, args.seed)
    late = args.system == "fsdp2-late"
    return Fsdp2Trainer(whole, adam_of(args), schedule_of(args), batches, world, args.micro_batch, late)


# --- measuring ------------------------------------------------------------------------------------------------------------


def timed(step: Callable[[], object], count: int, world: World) -> list[float]:
    """Seconds of each of `count` steps, of the slowest rank. Collective.

    On GPUs the steps are timed with events in the compute stream. So the host runs ahead as in training, and work that overlaps
    with the next step stays hidden. Garbage collection is off during the steps: it would stop the host for as long as a layer
    takes, at different times on each rank.
    """
    cuda = world.device.type == "cuda"

    def mark() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    gc.collect()
    gc.disable()
    try:
        marks = [mark()]
        for _ in range(count):
            step()
            marks.append(mark())
    finally:
        gc.enable()
    if cuda:
        torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in pairwise(marks)]
    return reduced(torch.tensor(seconds, dtype=torch.float64), world, dist.ReduceOp.MAX)


def reduced(values: torch.Tensor, world: World, operation: Any) -> list[float]:
    """`values` reduced over all ranks, as a list. Collective."""
    if world.world_size > 1:
        values = values.to(world.device)
        dist.all_reduce(values, op=operation)
    result: list[float] = values.tolist()
    return result


def tune(trainer: Fsdp2Trainer, world: World, steps: int) -> dict[int, float]:
    """Time each depth of prefetching and leave the fastest set. Returns the median ms per step by depth. Collective.

    The first of `steps` steps is not counted. On a CPU, where a run is only a test, and with fewer than 2 steps, nothing is timed
    and FSDP2 keeps its own order.
    """
    found: dict[int, float] = {}
    if world.device.type != "cuda" or steps < 2:
        return found
    for depth in PREFETCH:
        prefetch(trainer.whole, depth)
        found[depth] = 1e3 * median(timed(trainer.train_step, steps, world)[1:])
    prefetch(trainer.whole, min(found, key=found.__getitem__))
    return found


def covered(spans: Sequence[Span], by: Sequence[Span]) -> float:
    """The length of the part of the union of `spans` that lies inside the union of `by`."""
    return length(intersection(union(spans), union(by)))


def kernels(step: Callable[[], object], steps: int) -> tuple[dict[str, list[Span]], list[Span]]:
    """Profile some steps after a warm-up step. Returns the spans (µs) of NCCL's kernels by name, and of all other kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
        ) as recorder:
            for number in range(steps + 1):
                step()
                if number in (0, steps):
                    torch.cuda.synchronize()  # so that the trace has nothing of the first step and all of the last
                recorder.step()
        events = read_trace(path)["traceEvents"]
    communication: dict[str, list[Span]] = {}
    computation: list[Span] = []
    for event in events:
        if event.get("cat") == "kernel":
            nccl = event["name"].startswith("nccl")
            (communication.setdefault(event["name"], []) if nccl else computation).append(span_of(event))
    return communication, computation


def traced_exposed_ms(step: Callable[[], object], world: World, steps: int) -> float | None:
    """ms per step in which rank 0's GPU runs only NCCL's kernels, between the first and the last other kernel of `steps` steps.

    None on other ranks, on a CPU, and without steps. Collective.
    """
    if world.device.type != "cuda" or not steps:
        return None
    if world.rank:  # other ranks run the same steps without a trace
        for _ in range(steps + 1):
            step()
        return None
    communication, computation = kernels(step, steps)
    if not computation:
        return None
    spans = [span for some in communication.values() for span in some]
    whole = [(min(a for a, _ in computation), max(b for _, b in computation))]
    return (covered(spans, whole) - covered(spans, computation)) / 1e3 / steps


def build(args: argparse.Namespace, world: World) -> tuple[Trainer | Fsdp2Trainer, dict[str, Any]]:
    """The trainer of the system, and the first fields of its row. Raises UserError if it cannot be trained."""
    config = config_of(args)
    mesh = ranks_mesh(args, world.world_size)
    args.intra_tensor |= args.system in ("zero-1", "zero-2")  # as published, they distribute updates by all-gather
    batches = GlobalBatches(open_tokens(args.data, config.vocab_size), args.sequence_length, args.global_batch, args.seed)
    check_batch(args.global_batch, world.world_size, args.micro_batch)
    row: dict[str, Any] = {"precision": str(dtype_of(args, world.device)).removeprefix("torch.")}
    if args.system.startswith("fsdp2"):
        shape = copies(args.system, mesh)
        return build_fsdp2(args, config, world, batches, shape), row | {"sharding": " x ".join(str(n) for n in shape)}
    how = planned(args, config, mesh, world.device)
    predicted = 1e3 * how.step_seconds if how.step_seconds else None
    cut = args.intra_tensor or how.intra_tensor
    row |= {"sharding": f"{how.sharding}{', cut evenly' * cut}", "predicted_ms": predicted}
    return build_trainer(args, world, Setup(config, None, None, args.data, cross_entropy), batches, how), row


def config_of(args: argparse.Namespace) -> ModelConfig:
    known = preset(args.model)
    return replace(known, max_seq_len=max(known.max_seq_len, args.sequence_length))


def measure(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Build the system, train, close it, and return its row. Collective. Raises UserError if it cannot be trained."""
    trainer, row = build(args, world)
    if isinstance(trainer, Fsdp2Trainer):
        row["prefetch_ms"] = tune(trainer, world, args.tuning)
    timed(trainer.train_step, args.unmeasured, world)
    if isinstance(trainer, Trainer):
        trainer.executor.exposed.take()
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    measured = args.steps - args.unmeasured
    row["step_ms"] = [1e3 * seconds for seconds in timed(trainer.train_step, measured, world)]
    waited = trainer.executor.exposed.take() / measured if isinstance(trainer, Trainer) else 0.0
    memory = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    waited, memory = reduced(torch.tensor([waited, memory], dtype=torch.float64), world, dist.ReduceOp.MAX)
    return row | {
        "waited_ms": 1e3 * waited if isinstance(trainer, Trainer) else None,
        "traced_exposed_ms": traced(trainer, args, world),
        "peak_memory_gb": memory if cuda else None,
        **figures(args, world),
    }


def figures(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """The values from which speed and utilization are computed: tokens and FLOPs per step, and the peak FLOP/s of a GPU."""
    config = config_of(args)
    workload = workload_of(args, config, ranks_mesh(args, world.world_size), world.device)
    cuda = world.device.type == "cuda"
    return {
        "tokens_per_step": args.global_batch * args.sequence_length,
        "flops_per_step": 3 * forward_flops(config, args.sequence_length, args.global_batch),
        "peak_flops": workload.cluster.peak_flops(workload.precision) if workload is not None and cuda else None,
    }


def traced(trainer: Trainer | Fsdp2Trainer, args: argparse.Namespace, world: World) -> float | None:
    """The result of `traced_exposed_ms`. Closes the trainer."""
    found = traced_exposed_ms(trainer.train_step, world, args.traced)
    if isinstance(trainer, Trainer):
        trainer.executor.close()
    return found


def trace(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Build the system and trace it after a warm-up step. Collective. Raises UserError if it cannot be trained."""
    trainer, _ = build(args, world)
    trainer.train_step()
    return {"traced_exposed_ms": traced(trainer, args, world)}


def measure_links(args: argparse.Namespace, world: World) -> None:
    mesh = ranks_mesh(args, world.world_size)
    sizes = [4**power for power in range(7, 14)]  # 16 KiB to 64 MiB; for larger sizes bandwidth hardly changes
    found = profile_collectives.measure(world, mesh, sizes, repeats=10)
    if world.rank == 0:
        write_profile(args.result, found, {"device": world.device.type, "torch": torch.__version__, "ranks": world.world_size})


def join(device: str | None, gpus_per_node: int, two_nodes: bool) -> World:
    """Join the ranks that a launcher started."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off unless the user turns it on
    if two_nodes:
        separate_hosts(int(os.environ["RANK"]), gpus_per_node)
    torch.set_float32_matmul_precision("high")
    return init_world(device)


def main() -> None:
    args = parse_args()
    world = join(args.device, args.gpus_per_node, args.two_nodes)
    if args.links:
        measure_links(args, world)
        return
    row = together(world, lambda: trace(args, world) if args.only_trace else measure(args, world))
    if world.rank == 0:
        args.result.write_text(json.dumps(row))


if __name__ == "__main__":
    run(main)

"""Measure the times of collectives by size and mesh on the started ranks, and write the profile that the planner reads.

    python launch.py --ranks 4 -m training.profile_collectives --out profile.json
    torchrun --nnodes 16 --nproc_per_node 8 … -m training.profile_collectives --out profile.json
    python -m training.plan --model llama-7b --gpus 128 --cluster h100 --profile profile.json

For every mesh a x b that tiles the ranks, all groups of that shape communicate at the same time, as in training. A time is the
median over --repeats runs of the time of the slowest rank. On GPUs a run is a few calls queued one after the other, and its
time is their mean, so that the launch time on the host is hidden as in training. Slow collectives are repeated less often. Run
it on all nodes that you will train on: the planner interpolates between meshes, but does not extrapolate beyond the largest.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from cli import Parser, note, run
from comms.process_group import all_gather
from errors import UserError
from ranks.processes import rank
from tp import World, init_world, together
from training.groups import block_of, blocks_of
from training.options import ranks_mesh
from training.plan import count
from training.planner.collectives import OPERATIONS, Point, Profile, write_profile
from training.planner.search import tiling_meshes
from training.sharding import Mesh
from training.weights import reduce_scatter

WARM_UP = 2  # runs before those that are counted
QUEUED = 4  # calls per run on GPUs; 1 if a call takes longer than SLOW
SLOW = 5e-3  # seconds
PATIENCE = 1.0  # seconds that the runs of one operation and size may take, unless LEAST runs take longer
LEAST = 3  # the smallest number of runs


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profile that is written, as JSON")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: CUDA with NCCL if there is a GPU, else CPU with gloo"
    )
    parser.add_argument(
        "--gpus-per-node", type=count, metavar="N", help="ranks on each node (default: as many as were started on this one)"
    )
    parser.add_argument("--smallest", type=count, default=2**14, metavar="BYTES", help="smallest message (default: 16k)")
    parser.add_argument(
        "--largest",
        type=count,
        default=2**28,
        metavar="BYTES",
        help="largest message; each size is 4 times the one before (default: 256M)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=10,
        metavar="N",
        help="timed runs after two for warm-up; fewer if they are slow (default: 10)",
    )
    args = parser.parse_args(argv)
    if args.smallest > args.largest:
        raise UserError(f"--smallest {args.smallest} is above --largest {args.largest}; give a range, such as 16k and 256M")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}; make it, or name another file")
    return args


def cluster_mesh(args: argparse.Namespace, world_size: int) -> Mesh:
    """All ranks as a mesh. Raises UserError if there is only one, or if they do not fill whole nodes."""
    if world_size < 2:
        raise UserError(
            "a single rank has no other to communicate with; start several: python launch.py --ranks 2 -m training.profile_collectives …"
        )
    return ranks_mesh(args, world_size)


def collective(operation: str, whole: Tensor, group: dist.ProcessGroup, ranks: list[int]) -> Callable[[], None]:
    """The call to time. whole: (n,), where n is a multiple of the group's size; its bytes are those of the profile."""
    part = whole[: len(whole) // len(ranks)].clone()
    return {
        "all-gather": lambda: all_gather(whole, part, group=group),
        "reduce-scatter": lambda: reduce_scatter(part, whole, group=group),
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, src=ranks[0], group=group),
    }[operation]


def once(call: Callable[[], None], device: torch.device, queued: int = 1) -> float:
    """Seconds of one `call` on this rank. On GPUs: the mean over `queued` calls, queued one after the other."""
    dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(queued):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / queued


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The largest value over all ranks of each of `seconds`. Collective."""
    both = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    found: list[float] = both.tolist()
    return found


def timed(call: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Seconds of `call`: the median over the runs of the time of the slowest rank. Collective."""
    warm = slowest([once(call, device) for _ in range(WARM_UP)], device)[-1]
    queued = QUEUED if warm < SLOW else 1
    count = min(repeats, max(LEAST, int(PATIENCE / (warm * queued))))
    return median(slowest([once(call, device, queued) for _ in range(count)], device))


def measure(world: World, cluster: Mesh, sizes: Sequence[int], repeats: int) -> Profile:
    """Time every operation, mesh and size (bytes, rounded up to a multiple that the group can divide evenly). Collective."""
    points = []
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    meshes = [mesh for mesh in tiling_meshes(cluster) if mesh.size > 1]
    for mesh in tqdm(meshes, unit="mesh", disable=None if world.rank == 0 else True):
        blocks = blocks_of(partial(block_of, mesh=mesh, cluster=cluster), cluster.size)
        handles = [dist.new_group(block) for block in blocks]  # on all ranks: NCCL splits groups off the one of all ranks
        ranks, group = next((block, handle) for block, handle in zip(blocks, handles, strict=True) if world.rank in block)
        assert group is not None
        for size in sizes:
            count_of_rank = -(-size // (dtype.itemsize * mesh.size))
            whole = torch.zeros(count_of_rank * mesh.size, dtype=dtype, device=world.device)
            for operation in OPERATIONS:
                seconds = timed(collective(operation, whole, group, ranks), world.device, repeats)
                points.append(Point(operation, mesh, whole.nbytes, seconds))
        dist.destroy_process_group(group)
    return Profile(f"measured on {cluster}", cluster.gpus, points)


def main() -> None:
    args = parse_args()
    world = init_world(args.device)
    cluster = together(world, lambda: cluster_mesh(args, world.world_size))
    sizes = [args.smallest]
    while sizes[-1] * 4 <= args.largest:
        sizes.append(sizes[-1] * 4)
    profile = measure(world, cluster, sizes, args.repeats)
    if rank() == 0:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
        about = {
            "device": device,
            "backend": dist.get_backend().removeprefix("private_"),
            "torch": torch.__version__,
            "ranks": cluster.size,
        }
        write_profile(args.out, profile, about)
        note(f"wrote {len(profile.points)} times of {cluster.nodes} x {cluster.gpus} ranks to {args.out}")


if __name__ == "__main__":
    run(main)

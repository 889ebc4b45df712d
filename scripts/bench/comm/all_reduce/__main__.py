"""Check the all-reduces over shared memory on GPUs, and compare their latency with NCCL's and PyTorch's.

    python launch.py --ranks 4 -m scripts.bench.comm.all_reduce --out out/comm.json

Parts are independent: a failed part is reported, and the others still run. A part that hangs ends the process with a traceback.
`--parts quantized` runs only the quantized all-reduces. With NCCL_P2P_DISABLE=1 all of them use host memory.
"""

import re
from functools import partial

import torch
import torch.distributed as dist

from cli import Parser, run
from comm.quantize import WIDTHS
from comm.symmetric import CAPACITY
from errors import UserError
from scripts.bench.comm.all_reduce import checks, quantized, times
from scripts.bench.comm.all_reduce.bench import SIZES, Bench
from scripts.bench.comm.parts import add_gpu_options, join_ranks


def measure(bench: Bench, replays: int) -> None:
    """Run all parts, the most important first. Collective."""
    sizes = (8, 1000, 8192, 8200, 65536, 131072, 1 << 20)
    bench.part("correct bf16", partial(checks.sums, bench, torch.bfloat16, sizes))
    shapes = [(1, 8192), (4, 8192), (16, 8192), (64, 8192), (3, 1000), (9, 4096)]
    bench.part("correct norms", partial(checks.norms, bench, shapes))
    bench.part("correct gathers", partial(checks.gathers, bench))
    bench.part("replays", partial(checks.replays, bench, replays))
    bench.part("replays beside GEMMs", partial(checks.during_gemms, bench, replays // 10))
    bench.part("µs nccl", partial(bench.blocking, bench.nccl, SIZES))
    some_sizes = [n for n in SIZES if n <= CAPACITY["one-shot"]], SIZES
    for (kind, ours), those in zip(bench.ours.items(), some_sizes, strict=False):
        bench.part(f"µs {kind}", partial(bench.blocking, ours, those))
    bench.part("µs with norm", partial(times.with_norm, bench))
    bench.part("µs beside a GEMV", partial(times.during_a_gemv, bench))
    bench.part("µs one-shot tilings", partial(times.one_shot_tilings, bench))
    if bench.peers:
        bench.part("µs two-shot tilings", partial(times.two_shot_tilings, bench))
        for name, most in (("one_shot_all_reduce", 1 << 20), ("two_shot_all_reduce_", 1 << 26)):
            bench.part(f"µs torch {name}", partial(times.torch_op, bench, name, [n for n in SIZES if n <= most]))
    measure_quantized(bench, min(replays, 2000))
    for dtype in (torch.float32, torch.float16):
        if bench.in_time():
            bench.part(f"correct {dtype}", partial(checks.sums, bench, dtype, (1, 7, 1001, 8192, 70000)))


def measure_quantized(bench: Bench, replays: int) -> None:
    bench.part("correct quantized", partial(quantized.sums, bench))
    bench.part("replays quantized", partial(quantized.replays, bench, replays))
    for name in WIDTHS:
        bench.part(f"µs quantized {name}", partial(quantized.on_main_stream, bench, name))
    for name in quantized.SIDE_STREAM_WIDTHS:
        if bench.peers:
            bench.part(f"µs quantized tilings {name}", partial(quantized.tilings, bench, name))
        bench.part(f"µs quantized beside {name}", partial(quantized.on_side_stream, bench, name))
        bench.part(f"µs portable quantized {name}", partial(quantized.portable, bench, name))
    bench.part("correct quantized norms", partial(quantized.norms, bench))
    if bench.peers:
        bench.part("µs quantized with norm", partial(quantized.with_norm, bench))


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    add_gpu_options(parser, replays=10_000, seconds=70.0)
    parser.add_argument(
        "--parts",
        default=r"^(?!.*quantized)",
        help="run only the parts whose names match this regular expression (default: all but quantized all-reduces; '.' for all)",
    )
    arguments = parser.parse_args()
    try:
        re.compile(arguments.parts)
    except re.error as error:
        raise UserError(f"--parts {arguments.parts} is no regular expression: {error}") from None
    world = join_ranks("cuda")
    with torch.inference_mode():
        bench = Bench(world, arguments.seconds, arguments.parts)
        measure(bench, arguments.replays)
    bench.write_gpu_report(arguments.out, p2p=bench.peers)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

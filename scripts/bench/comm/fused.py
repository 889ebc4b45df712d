"""Measure how much of the communication around a tensor-parallel GEMM is hidden when both are fused, with the metrics of the
Flux paper (Chang et al., arXiv:2406.06858).

    python launch.py --ranks 4 -m scripts.bench.comm.fused --shapes llama --seconds 60

Section 2.3 of the paper defines two metrics. Effective communication time: ECT = overall time - time of the best GEMM that is
not split (equation 1). Overlap efficiency: 1 - ECT / (ECT without overlap, that is of a GEMM and NCCL) (equation 2). At 100 %
all communication is hidden; below 0 % the fused algorithm is slower than without overlap.

A layer is all-gather + GEMM (m rows; the n output features are split over the ranks) or GEMM + reduce-scatter (the k input
features are split). An all-gather whose name ends in `-pull` fetches rows from their owners; others push them. `/4` means that
rows are sent in four chunks (figures 9 and 10). Writes gemm-overlap.json, .md and .svg.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from cli import Parser, note, run
from comm.fused import FusedAllReduce, FusedCommunicator
from comm.fused_strategies import GATHERS, TILED, UNTILED, Gather, Split, Strategy
from comm.row_buffers import Share
from comm.table import graph_microseconds
from errors import UserError
from figures import BLACK, CYCLE, MOST_LINES
from kernels import fused_rows
from kernels.linear import linear
from scripts.bench.comm.parts import Parts, Replays, join_ranks
from scripts.lib.machine import describe, machine
from tp import World

NAME = "gemm-overlap"
MOST_ROWS = 64  # most rows of each owner that are checked
CAPACITY = 8192 * 12288 * 2  # bytes of the largest residual stream measured here
ROWS = tuple(1 << i for i in (10, 12, 13, 11, 9, 8, 7, 6))  # m, the most informative first, since time may run out
# torch 2.13 renamed these functions and warns about the old names; torch 2.11 has only the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
UNFUSED, GEMM, TORCH = "unfused", "GEMM", "torch"


@dataclass(frozen=True)
class Layer:
    """A layer whose weight has the shape (n, k) over all ranks. scatter: GEMM + reduce-scatter, else all-gather + GEMM."""

    name: str
    n: int
    k: int
    scatter: bool


SHAPES: dict[str, tuple[Layer, ...]] = {
    "llama": (
        Layer("w_gate_up", 57344, 8192, False),
        Layer("w_down", 8192, 28672, True),
        Layer("wqkv", 10240, 8192, False),
        Layer("wo", 8192, 8192, True),
    ),
    "gpt3": (Layer("GPT-3 up", 49152, 12288, False), Layer("GPT-3 down", 12288, 49152, True)),
    "tiny": (Layer("tiny up", 512, 64, False), Layer("tiny down", 64, 256, True)),
}


@dataclass(frozen=True)
class Row:
    """The time of a layer with m rows by one algorithm, and the paper's two metrics.

    overall: µs of the algorithm; gemm: µs of the best GEMM alone; unfused: µs of GEMM and NCCL without overlap.
    """

    layer: str
    scatter: bool
    m: int
    n: int
    k: int
    way: str
    overall: float
    gemm: float
    unfused: float

    @property
    def ect(self) -> float:
        return self.overall - self.gemm

    @property
    def efficiency(self) -> float | None:
        """Overlap efficiency. None if there is nothing to hide: the unfused algorithm takes no longer than the GEMM."""
        exposed = self.unfused - self.gemm
        return 1 - self.ect / exposed if exposed > 0 else None


Call = Callable[[], Tensor]


class Bench(Parts):
    """The layers' operands, and the algorithms that compute the layers."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        self.n, self.rank = world.world_size, world.rank
        self.gpu = world.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        capacity = CAPACITY if self.gpu else 1 << 18
        self.comm = FusedCommunicator(world.comm, world.device, capacity=capacity, min_rows=1, strategy=Strategy())
        self.scatters: list[Split] = [*UNTILED, *TILED] if self.gpu else list(UNTILED)
        others = [Gather(split) for split in self.scatters if split not in GATHERS]
        self.gathers = [gather for gather in (*GATHERS.values(), *others) if gather.split in self.scatters]

    def check(self) -> None:
        self.comm.check()

    def tell(self, name: str, seconds: float, failed: str | None) -> None:
        """Print only errors, because a progress bar is shown."""
        if failed:
            note(f"{name}: {failed}")

    # --- the algorithms ----------------------------------------------------------------------------------------------------------

    def calls(self, layer: Layer, weight: Tensor, m: int) -> tuple[dict[str, Call], Tensor]:
        """Every algorithm for a layer by name, and the layer's input x.

        x has all m rows of this rank's input features (scatter), or this rank's m / ranks rows of all features (gather).
        """
        x = self.random(m, weight.shape[1]) if layer.scatter else self.random(m // self.n, weight.shape[1])
        whole = x if layer.scatter else self.random(m, weight.shape[1])
        calls: dict[str, Call] = {GEMM: lambda: torch.mm(whole, weight.t()), f"{GEMM} of rung": lambda: linear(whole, weight)}
        calls[UNFUSED] = (lambda: self._reduce_scatter(x, weight)) if layer.scatter else lambda: self._gather(x, weight)
        if self.gpu:
            calls[TORCH] = self._torch(layer, x, weight)
        if layer.scatter:
            return calls | {split: self._fused_scatter(x, weight, split) for split in self.scatters}, x
        return calls | {str(way): self._fused_gather(x, weight, way) for way in self.gathers}, x

    def _gather(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.new_empty(len(x) * self.n, x.shape[1])
        _all_gather(rows, x)
        return torch.mm(rows, weight.t())

    def _reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        products = torch.mm(x, weight.t())
        mine = products.new_empty(len(x) // self.n, len(weight))
        _reduce_scatter(mine, products)
        return mine

    def _torch(self, layer: Layer, x: Tensor, weight: Tensor) -> Call:
        """PyTorch's fused operators, which the import registers. Without `return_A` the all-gather would use NVLink multicast
        if the machine has it."""
        import torch.distributed._symmetric_memory

        assert dist.group.WORLD is not None
        group, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
        if layer.scatter:
            return lambda: ops.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)
        return lambda: ops.fused_all_gather_matmul(x, [weight.t()], 0, group, return_A=True)[1][0]

    def _fused_scatter(self, x: Tensor, weight: Tensor, split: Split) -> Call:
        buffers, share = self.comm.buffers, Share(len(x) // self.n, len(weight), x.dtype)

        def call() -> Tensor:
            buffers.scatter(x, weight, split)
            fused_rows.reduce_rows(buffers.places, share.rows, share.size, share.dtype, None)
            buffers.join()
            return buffers.my_rows(self.rank, share)

        return call

    def _fused_gather(self, x: Tensor, weight: Tensor, way: Gather) -> Call:
        """The fused all-gather + GEMM of rows that are in the buffer already, where the norm before the layer writes them."""
        buffers, share = self.comm.buffers, Share(len(x), x.shape[1], x.dtype)

        def call() -> Tensor:
            fused_rows.advance(buffers.places)
            return buffers.gather_linear(share, weight, None, way)

        return call

    # --- figures -----------------------------------------------------------------------------------------------------------------

    def layer(self, layer: Layer, m: int) -> list[Row]:
        """Check, then time all algorithms for m rows. Collective.

        Repeated calls have the same input, so that a rank that is ahead overwrites rows that others still read with equal values.
        """
        made = f"{layer.name} {m} operands"
        if (operands := self.part(made, lambda: self._operands(layer, m))) is None:
            return []
        self.found.pop(made)  # the report must not keep the operands
        calls, x, exact = operands
        times, allowed = {}, 0.0
        for name, call in calls.items():
            if not name.startswith(GEMM):
                self._spoil(layer, x)
                error = self.part(f"{layer.name} {m} {name} result", lambda call=call: self._error(call, exact))  # type: ignore[misc]
                if name == UNFUSED:
                    # rounding errors of the result, and of k additions in fp32 in another order
                    rounding = torch.finfo(self.dtype).eps + layer.k**0.5 * torch.finfo(torch.float32).eps
                    allowed = max(2 * (error or 0.0), rounding * self._largest(exact[1]))
                if error is None or error > allowed:
                    self.errors.setdefault(f"{layer.name} {m} {name} result", f"an error of {error}, {allowed} is allowed")
                    continue
            times[name] = self.part(f"{layer.name} {m} {name}", lambda call=call: self._time(call))  # type: ignore[misc]
        return self._rows(layer, m, {name: t for name, t in times.items() if t is not None})

    def _operands(self, layer: Layer, m: int) -> tuple[dict[str, Call], Tensor, tuple[Tensor, Tensor]]:
        """The calls for a random weight, their input, and the reference of `_exact`."""
        n, k = (layer.n, layer.k // self.n) if layer.scatter else (layer.n // self.n, layer.k)
        weight = self.random(n, k) / k**0.5
        calls, x = self.calls(layer, weight, m)
        return calls, x, self._exact(layer, x, weight)

    def _spoil(self, layer: Layer, x: Tensor) -> None:
        """Fill the buffers of partial sums and rows with NaNs, so that results of an earlier call cannot hide an error of a later one.

        A gather's own input rows x are written into the buffer again.
        """
        buffers = self.comm.buffers
        buffers.shared.views[self.rank][buffers.places.partials :].fill_(255)
        if not layer.scatter:
            buffers.my_rows(self.rank, Share(len(x), x.shape[1], x.dtype)).copy_(x)

    def _rows(self, layer: Layer, m: int, times: dict[str, float]) -> list[Row]:
        gemms = [t for name, t in times.items() if name.startswith(GEMM)]
        if UNFUSED not in times or not gemms:
            return []
        ways = {name: t for name, t in times.items() if not name.startswith(GEMM)}
        shape = layer.name, layer.scatter, m, layer.n, layer.k
        return [Row(*shape, name, t, min(gemms), times[UNFUSED]) for name, t in ways.items()]

    def _time(self, call: Call) -> float:
        if self.gpu:
            return graph_microseconds(call, chain=4, replays=5)
        call()
        begin = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item() * 1e6

    def _exact(self, layer: Layer, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of some rows of the result, and the fp32 values of these rows. Collective.

        In a scatter they are of this rank's rows, else of all rows.
        """
        if layer.scatter:
            share = len(x) // self.n
            some = torch.arange(0, share, max(1, share // MOST_ROWS), device=x.device)
            parts = torch.cat([x[owner * share + some] for owner in range(self.n)]).float() @ weight.float().t()
            dist.all_reduce(parts)
            return some, parts[self.rank * len(some) :][: len(some)]
        rows = x.new_empty(len(x) * self.n, x.shape[1])
        _all_gather(rows, x)
        some = torch.arange(0, len(rows), max(1, len(x) // MOST_ROWS), device=x.device)
        return some, rows[some].float() @ weight.float().t()

    def _error(self, call: Call, exact: tuple[Tensor, Tensor]) -> float:
        some, values = exact
        dist.barrier()  # no rank is still reading what this call overwrites
        result = call()
        error = self._largest(result[some].float() - values)
        dist.barrier()
        return error

    def _largest(self, x: Tensor) -> float:
        largest = x.abs().max()
        largest = torch.where(largest.isnan(), torch.inf, largest)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    # --- replays -----------------------------------------------------------------------------------------------------------------

    def replays(self, count: int) -> int:
        """Run pairs of layers with every gather repeatedly, on a GPU as replays of a CUDA graph. Returns the number of replays.

        Each replay has other inputs. They are small integers, whose sums are exact, and the graph itself counts wrong values.
        """
        test = Replays(self.world.device)
        pair = _IntegerPair(self, test.step)

        def body() -> None:
            for i, gather in enumerate(self.gathers):
                test.wrong.add_(pair.wrong(Strategy(self.scatters[i % len(self.scatters)], gather), salt=i))

        test.run(body, count)
        return count


class _IntegerPair:
    """Two layers of small integers with an all-reduce between them. Its sums (T, C) are at most 4 x 32, so exact even in bf16."""

    def __init__(self, bench: Bench, step: Tensor) -> None:
        self.bench, self.step, world = bench, step, bench.world
        share, self.k, self.c, m = (544, 32, 256, 128) if bench.gpu else (2, 32, 16, 24)
        self.rows = share * world.world_size
        self.index = torch.arange(self.rows * self.k, device=world.device).view(self.rows, self.k)
        columns = torch.arange(self.c * self.k, device=world.device).view(self.c, self.k)
        self.firsts = [((columns * 7 + columns // self.k + r) % 3 - 1).to(bench.dtype) for r in range(world.world_size)]
        behind = torch.arange(m * self.c, device=world.device).view(m, self.c)
        self.second = ((behind * 5 + behind // self.c) % 3 - 1).to(bench.dtype)
        self.scale = torch.ones(self.c, dtype=bench.dtype, device=world.device)
        self.stream = torch.zeros(1, self.rows, self.c, dtype=bench.dtype, device=world.device)

    def inputs(self, rank: int, salt: int) -> Tensor:
        return ((self.index * 3 + self.index // self.k + self.step * 7 + rank * 5 + salt) % 5 < 2).to(self.bench.dtype)[None]

    def wrong(self, strategy: Strategy, salt: int) -> Tensor:
        """Number of wrong values in the output of a fused pair, and in the whole residual stream of a second all-reduce."""
        comm, rank = self.bench.comm, self.bench.rank
        inputs = [self.inputs(r, salt) for r in range(self.bench.n)]
        parts = [x @ first.t() for x, first in zip(inputs, self.firsts, strict=True)]
        total = torch.stack(parts).sum(0)
        pair, last = (FusedAllReduce(comm, inputs[rank], self.firsts[rank], strategy) for _ in range(2))
        rows = pair.scatter_add_norm(self.stream, self.scale, 1e-5)
        out = pair.gather_linear(self.second)
        whole = last.add(rows)
        normed = torch.nn.functional.rms_norm(total, self.scale.shape, self.scale, 1e-5)
        expected = (normed @ self.second.t()).float()
        far = (out.float() - expected).abs() > 0.02 * expected.abs().max()  # norms may round differently
        return far.sum() + (whole != 2 * total).sum()


# --- the report ------------------------------------------------------------------------------------------------------------------


def markdown(rows: list[Row], title: str) -> str:
    """A Markdown table of the layers that gather, and one of those that scatter."""
    tables = [table([row for row in rows if row.scatter is scatter]) for scatter in sorted({row.scatter for row in rows})]
    return "\n".join([f"µs, and overlap efficiency; {title}\n", *tables])


def table(rows: list[Row]) -> str:
    """One line per layer and m: µs of the GEMM, and µs of each algorithm with its overlap efficiency."""
    ways = list(dict.fromkeys(row.way for row in rows))
    head = ["GEMM + reduce-scatter" if rows[0].scatter else "all-gather + GEMM", "n", "k", "m", "GEMM", *ways]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for (layer, m), group in by_shape(rows).items():
        cells = {row.way: f"{row.overall:.1f}{percent(row)}" for row in group}
        shape = map(str, (layer, group[0].n, group[0].k, m))
        line = [*shape, f"{group[0].gemm:.1f}", *(cells.get(way, "–") for way in ways)]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines) + "\n"


def percent(row: Row) -> str:
    return "" if row.way == UNFUSED or row.efficiency is None else f" ({row.efficiency:.0%})"


def by_shape(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.layer, row.m)):
        found.setdefault((row.layer, row.m), []).append(row)
    return found


def shown_ways(rows: list[Row]) -> list[str]:
    """The algorithms that a panel shows: unfused, torch's, and ours that are fastest at some m, the most often fastest first."""
    peers = [way for way in (UNFUSED, TORCH) if any(row.way == way for row in rows)]
    best = Counter(
        min((row for row in rows if row.m == m and row.way not in peers), key=lambda row: row.overall).way
        for m in sorted({row.m for row in rows})
        if any(row.m == m and row.way not in peers for row in rows)
    )
    return [*peers, *(way for way, _ in best.most_common(MOST_LINES - len(peers)))]


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Plot effective communication time relative to the GEMM's time by m: one panel per layer, one line per algorithm.

    The axis is linear up to 100 % and logarithmic above, so that no point is cut off. Algorithms that are not drawn are in the
    table. There are no error bars because the report holds only medians.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    layers = list(dict.fromkeys(row.layer for row in rows))
    if not layers:
        return
    columns = min(len(layers), 2)
    lines_of_panels = -(-len(layers) // columns)
    size = 3.4 * columns, 2.9 * lines_of_panels + 0.6
    figure, panels = plt.subplots(lines_of_panels, columns, figsize=size, squeeze=False, layout="constrained", sharey=True)
    styles = line_styles(list(dict.fromkeys(row.way for row in rows)))
    for panel, layer in zip(panels.flat, layers, strict=False):
        of_layer = [row for row in rows if row.layer == layer]
        for way in shown_ways(of_layer):
            points = sorted((row.m, 100 * row.ect / row.gemm) for row in of_layer if row.way == way)
            panel.plot(*zip(*points, strict=True), markersize=4, linewidth=1.2, label=way, **styles[way])
        panel.set_yscale("symlog", linthresh=100, linscale=2)
        panel.yaxis.set_major_locator(FixedLocator([0, 20, 40, 60, 80, 100, 200, 400, 1000]))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_xscale("log", base=2)
        ticks = sorted({row.m for row in of_layer})[::2]
        panel.set_xticks(ticks, [f"{m:,}" for m in ticks], fontsize=8)
        panel.set_title(f"{layer} ({of_layer[0].n}, {of_layer[0].k})", fontsize=9, loc="left")
        panel.axhline(0, color="#9ca3af", linewidth=0.8)
        panel.axhline(100, color="#9ca3af", linewidth=0.8, linestyle=":")
        panel.legend(frameon=False, fontsize=7)
    for panel in panels.flat[len(layers) :]:
        panel.set_axis_off()
    figure.supylabel("effective communication time, % of the GEMM's", fontsize=9)
    figure.supxlabel("m, rows", fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def line_styles(ways: list[str]) -> dict[str, dict[str, str]]:
    """Line styles by algorithm: a colour for each way to split the GEMM, dashes for pulls, a marker for each number of chunks."""
    parts = {way: way.partition("/")[::2] for way in ways}
    splits = list(dict.fromkeys(carried.removesuffix("-pull") for carried, _ in parts.values()))
    markers, colours = {"": "o", "2": "s", "4": "^"}, (BLACK, *CYCLE)
    return {
        way: {
            "color": colours[splits.index(carried.removesuffix("-pull")) % len(colours)],
            "linestyle": "--" if carried.endswith("-pull") else "-",
            "marker": markers.get(chunks, "x"),
        }
        for way, (carried, chunks) in parts.items()
    }


def rows_of(report: dict[str, Any]) -> tuple[list[Row], str]:
    """A report's rows, and the ranks, dtype and machine that it was made with."""
    rows = [Row(*(row[name] for name in Row.__dataclass_fields__)) for row in report["rows"]]
    return rows, f"{report['ranks']} ranks, {report['dtype']}; {report['where']}"


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the JSON file, the table, and, if matplotlib is installed, the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(json.dumps(report, indent=1) + "\n")
    rows, title = rows_of(report)
    (folder / f"{NAME}.md").write_text(markdown(rows, title))
    note(markdown(rows, title))
    try:
        plot(rows, title, folder / f"{NAME}.svg")
    except ImportError:
        note(f"no plot without matplotlib; --report {folder / NAME}.json draws it elsewhere")


# --- the command -----------------------------------------------------------------------------------------------------------------


def jobs(bench: Bench, layers: list[Layer], sizes: list[int]) -> Iterator[list[Row]]:
    todo = [(layer, m) for m in sizes for layer in layers]
    for layer, m in tqdm(todo, unit="layer", disable=bench.rank > 0):
        if m % bench.n or not bench.in_time():
            continue
        yield bench.layer(layer, m)


def measure(world: World, layers: list[Layer], sizes: list[int], seconds: float, replays: int) -> dict[str, Any]:
    with torch.inference_mode():
        bench = Bench(world, seconds)
        replayed = bench.part("replays", lambda: bench.replays(replays)) if replays else 0
        rows = [row for found in jobs(bench, layers, sizes) for row in found]
    return {
        "where": describe(machine(), world.device.type),
        "ranks": world.world_size,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "seed": bench.seed,
        "replays": replayed,
        "rows": [asdict(row) | {"ect": row.ect, "efficiency": row.efficiency} for row in rows],
        "errors": bench.errors,
    }


def main() -> None:
    parser = Parser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), help="default: llama gpt3, on a CPU tiny")
    parser.add_argument("--rows", type=int, nargs="+", help="m (default 64 to 8192)")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further layer is measured (default 60)")
    parser.add_argument("--replays", type=int, default=1000, help="of a CUDA graph that checks itself (default 1000)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is any")
    parser.add_argument("--report", type=Path, help="measure nothing; write the table and the plot of this JSON file")
    arguments = parser.parse_args()
    if arguments.report:
        return write(json.loads(arguments.report.read_text()), arguments.out)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off unless the user turns it on
    world = join_ranks(arguments.device)
    on_gpu = world.device.type == "cuda"
    names = arguments.shapes or (["llama", "gpt3"] if on_gpu else ["tiny"])
    sizes = arguments.rows or (list(ROWS) if on_gpu else [16, 8])
    layers = [layer for name in names for layer in SHAPES[name]]
    if bad := [m for m in sizes if m < 1 or m % world.world_size]:
        raise UserError(f"--rows {bad[0]}: give numbers that {world.world_size} ranks can divide")
    report = measure(world, layers, sizes, arguments.seconds, arguments.replays)
    if world.rank == 0:
        write(report, arguments.out)
    return None


if __name__ == "__main__":
    run(main)

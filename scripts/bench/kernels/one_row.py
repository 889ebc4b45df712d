"""Choose the kernels of one row in chains of whole layers on one GPU; make a part of a table for `kernels/linear_configs`.

    python -m scripts.bench.kernels.one_row --out one-row.json      # all models on 1 to 8 ranks, a minute on an H200
    python -m scripts.bench.kernels.linear --merge one-row.json     # into kernels/linear_configs

`scripts/bench/kernels/linear.py` compares kernels in chains of equal layers. In a model the four linear layers take turns, and each
starts while one of another shape ends, so another kernel may be the fastest. This script takes that table, so merge its configs
first. For each shape with one row it knows two kernels: the table's, and the stream kernel that the table has for two rows. It
measures all their combinations for the four layers of a rank, without norms, attention and all-reduces. Shapes that already
stream one row stay.

A model's fastest combination replaces the table's if its chain takes at least 0.5 % less time. Models can share a shape: the
combination is dropped if with it a chain of another model takes over 0.5 % more time than with the table's. Writes {"machine", "gpu",
"version", "times", "configs"}: µs a layer of all combinations, and the configs that differ from the table's.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from cli import Parser, run
from errors import UserError
from kernels import linear_config
from kernels.graph_times import replay_seconds
from kernels.linear import linear, linear_swiglu
from kernels.linear_config import Config, Stream, format_config, table_key
from kernels.linear_tuning import Shape
from scripts.bench.kernels.linear import DEGREES, MODELS, write
from scripts.lib.machine import machine

LAYERS = 24  # in a chain
LEAST_BYTES = 512 << 20  # of the chain's weights, ten times the L2 cache
REPLAYS, TURNS = 7, 3  # of each combination, which take turns, because the GPU's clock drifts
MARGIN = 0.005  # of a chain's time: by as much another combination has to be faster, and may be slower for another model
NAMES = ("qkv", "o", "gate_up-swiglu", "down")

Kernels = tuple[Config | None, ...]  # of NAMES


@dataclass(frozen=True)
class Chain:
    """What was measured of a model on some ranks."""

    keys: Sequence[str]  # of NAMES in the table, for one row
    seconds: Mapping[Kernels, float]  # of each combination, the table's first

    @property
    def table(self) -> Kernels:
        return next(iter(self.seconds))

    def best(self) -> Kernels:
        """The fastest combination; the table's if no other is faster by MARGIN."""
        fastest = min(self.seconds, key=lambda kernels: self.seconds[kernels])
        return fastest if self.seconds[fastest] < (1 - MARGIN) * self.seconds[self.table] else self.table

    def kernels(self, configs: Mapping[str, Config | None]) -> Kernels:
        """The combination if `configs` replace the table's."""
        return tuple(configs.get(key, usual) for key, usual in zip(self.keys, self.table, strict=True))

    def changed(self, kernels: Kernels) -> list[str]:
        """The NAMES whose kernel is not the table's."""
        return [name for name, one, usual in zip(NAMES, kernels, self.table, strict=True) if one != usual]


def keys(shapes: Mapping[str, Shape], rows: int = 1) -> list[str]:
    return [table_key(rows, shapes[name].n, shapes[name].k, shapes[name].swiglu) for name in NAMES]


def choices(known: Mapping[str, Config | None], shapes: Mapping[str, Shape]) -> list[Kernels]:
    """All combinations of kernels, the table's first. Empty if the table lacks a shape."""
    options: list[Kernels] = []
    for one, two in zip(keys(shapes), keys(shapes, rows=2), strict=True):
        if one not in known:
            return []
        other = known.get(two)
        streams = isinstance(other, Stream) and not isinstance(known[one], Stream)
        options.append((known[one], other) if streams else (known[one],))
    return list(product(*options))


def agreed(chains: Sequence[Chain]) -> dict[str, Config | None]:
    """The configs that replace the table's. The first models decide, unless a later one would be slower."""
    configs: dict[str, Config | None] = {}
    for chain in chains:
        best = zip(chain.keys, chain.best(), chain.table, strict=True)
        wanted = configs | {key: kernel for key, kernel, usual in best if kernel != usual}
        if all(one.seconds[one.kernels(wanted)] <= (1 + MARGIN) * one.seconds[one.table] for one in chains):
            configs = wanted
    return configs


def weights(shapes: Mapping[str, Shape]) -> list[list[Tensor]]:
    """Of as many layers as the L2 cache cannot hold, up to LAYERS."""
    count = min(LAYERS, -(-LEAST_BYTES // sum(shapes[name].bytes for name in NAMES)))
    sizes = [(shapes[name].n, shapes[name].k) for name in NAMES]
    return [[torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5) for n, k in sizes] for _ in range(count)]


def run_chain(layers: Sequence[Sequence[Tensor]], attended: Tensor, x: Tensor) -> Tensor:
    """LAYERS layers without norms and attention, whose output is `attended` (1, heads * head_dim). x and result: (1, hidden)."""
    for qkv, o, gate_up, down in islice(cycle(layers), LAYERS):
        linear(x, qkv)
        x = linear(linear_swiglu(linear(attended, o), gate_up), down)
    return x


def captured(call: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call()
    return graph


@torch.inference_mode()
def measured(shapes: Mapping[str, Shape], combinations: Sequence[Kernels]) -> dict[Kernels, float]:
    """Seconds of a chain with each of these combinations."""
    layers = weights(shapes)
    attended, x = (torch.randn(1, shapes[name].k, device="cuda", dtype=torch.bfloat16) for name in ("o", "qkv"))
    graphs = {}
    for kernels in combinations:
        linear_config.use(dict(zip(keys(shapes), kernels, strict=True)))
        graphs[kernels] = captured(lambda: run_chain(layers, attended, x))
    found: dict[Kernels, list[float]] = {kernels: [] for kernels in combinations}
    for _ in range(TURNS):
        for kernels, graph in graphs.items():
            graph.replay()
            found[kernels] += replay_seconds(graph, REPLAYS)
    return {kernels: median(times) for kernels, times in found.items()}


def cases(words: Sequence[str]) -> Iterator[tuple[str, dict[str, Shape]]]:
    """The name of each model on some ranks, such as llama-70b-tp4, that contains one of `words` (none: all), and its shapes."""
    for model, ranks in product(MODELS, DEGREES):
        name = f"{model.name}-tp{ranks}"
        if model.fits(ranks) and (not words or any(word in name for word in words)):
            yield name, model.shapes(ranks)


def describe(name: str, chain: Chain) -> str:
    usual, best = chain.seconds[chain.table], chain.best()
    text = f"{name:>22}: {1e6 * usual / LAYERS:7.2f} us a layer"
    less = 100 * (1 - chain.seconds[best] / usual)
    return text + (f", {less:4.1f} % less with {', '.join(chain.changed(best))} streamed" if best != chain.table else "")


def lines(name: str, chain: Chain) -> list[dict[str, object]]:
    return [
        {"model": name, "streamed": chain.changed(kernels), "us": round(1e6 * seconds / LAYERS, 2)}
        for kernels, seconds in chain.seconds.items()
    ]


def bench(words: Sequence[str], out: Path) -> None:
    known = dict(linear_config.measured())  # before `measured` changes it
    chains: dict[str, Chain] = {}
    for name, shapes in cases(words):
        if len(combinations := choices(known, shapes)) > 1:
            chains[name] = Chain(keys(shapes), measured(shapes, combinations))
            print(describe(name, chains[name]), flush=True)
    if not chains:
        raise UserError(
            "no such model has two kernels to choose from: this GPU's table has none that streams weights for two rows"
        )
    configs = agreed(list(chains.values()))
    for name, chain in chains.items():
        if chain.kernels(configs) != chain.best():
            streamed = ", ".join(chain.changed(chain.kernels(configs))) or "nothing"
            print(f"{name} has {streamed} streamed, because of another model with such a shape")
    times = [line for name, chain in chains.items() for line in lines(name, chain)]
    chosen = {key: format_config(kernel) for key, kernel in configs.items()}
    write({"machine": machine(), "gpu": torch.cuda.get_device_name(), "times": times, "configs": chosen}, out)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("one-row.json"), help="the file to write (default: one-row.json)")
    parser.add_argument("--device", type=int, default=0, help="the GPU's index (default: 0)")
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        help="only models whose name contains one of these words, such as llama-70b-tp4; others that share a shape are not checked",
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        raise UserError("measuring needs a GPU, and this machine shows none")
    torch.cuda.set_device(args.device)
    bench(args.models, args.out)


if __name__ == "__main__":
    run(main)

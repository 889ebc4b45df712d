"""Check and time row-parallel layers that push their partial sums, against the layer followed by a one-shot all-reduce.

    python launch.py --ranks 4 -m scripts.bench.comm.push --out out/push.json
    python launch.py --ranks 2 -m scripts.bench.comm.push --out out/push.json --quantize fp8 int4

Both must give the same bits. The layers are Llama-70B's output and down projections over 4 ranks. Each layer of a timed chain
has its own weight.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cli import Parser, run
from comm.faults import check_faults
from comm.table import graph_microseconds
from comm.workspace import open_workspace
from kernels.all_reduce import one_shot, one_shot_add_norm, one_shot_bytes
from kernels.linear import linear, linear_with
from kernels.linear_config import Config, Gemv, Mma, format_config
from kernels.linear_push import linear_push, push_config, quantized_push_config, receive, receive_add_norm, shape_of
from kernels.linear_quantized import Packed, pack
from kernels.linear_quantized import linear as quantized_linear
from kernels.linear_quantized import linear_with as quantized_linear_with
from quantized.scheme import ON_LOAD, SCHEMES, Scheme
from quantized.weight import dequantize, quantize
from scripts.bench.comm.parts import Parts, Replays, add_gpu_options, join_ranks
from tp import World

WIDTH = 8192  # of a residual stream
CAPACITY = 256 << 10  # bytes of a message: 16 rows
MAX_POLLS = 1 << 26  # polls before a kernel gives up: several seconds, enough for another rank to compile
COLUMNS = {"o": 2048, "down": 7168}  # columns of a layer's weight
EACH = 10  # number of weights per layer
ROWS = (1, 2, 4, 8, 16)
CANDIDATES: dict[int, list[Config]] = {  # by rows, in addition to that of `push_config`
    1: [Gemv(2, 2048, 4, False), Gemv(2, 4096, 8, True)],
    4: [Mma(64, 128, 3, 3)],
    16: [Mma(64, 128, 3, 3)],
}

FORMATS = {  # that are checked, by the values of --quantize
    "fp8": (SCHEMES["fp8"], Scheme(ON_LOAD, 8, is_float=True, group=128)),
    "int8": (SCHEMES["int8"], Scheme(ON_LOAD, 8, group=64, symmetric=False)),
    "int4": (
        SCHEMES["int4"],
        Scheme(ON_LOAD, 4),
        Scheme(ON_LOAD, 4, group=32),
        Scheme(ON_LOAD, 4, group=64, symmetric=False),
    ),
}

Weight = Tensor | Packed
AddNorm = Callable[[Tensor, Any, Tensor], tuple[Tensor, Tensor]]  # of (input, weight, residual)


def config_of(rows: int, weight: Weight, dtype: torch.dtype) -> Any:
    """The config by which a layer pushes its result; None if it does not."""
    if isinstance(weight, Packed):
        return quantized_push_config(rows, weight, dtype)
    return push_config(rows, *weight.shape, dtype)


def by_itself(x: Tensor, weight: Weight, chosen: Any) -> Tensor:
    """The layer by itself, by the same config."""
    if isinstance(weight, Packed):
        ordered = x if weight.columns is None else x.index_select(-1, weight.columns)
        return quantized_linear_with(ordered, weight, None, chosen, False)
    return linear_with(x, weight, None, chosen, False)


class Bench(Parts):
    """The checks and timings, with two workspaces: one for pushed sums, one for the one-shot all-reduces to compare with. `use` must
    come first."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        self.opened = [open_workspace(one_shot_bytes, CAPACITY, world.device) for _ in range(2)]
        for workspace in self.opened:
            workspace.exchange = replace(workspace.exchange, max_polls=MAX_POLLS)
        self.pushed, self.other = (workspace.exchange for workspace in self.opened)
        self.norm = self.common(WIDTH)
        self.weights: dict[str, list[Any]] = {}

    def use(self, kind: str | None) -> None:
        """Take layers whose weights are quantized as --quantize says; None: in 16 bits."""

        def one(k: int) -> Weight:
            return self.quantized(WIDTH, k, SCHEMES[kind])[0] if kind else self.weight(WIDTH, k)

        self.weights = {}  # before others take its memory
        self.weights = {name: [one(k) for _ in range(EACH)] for name, k in COLUMNS.items()}

    def check(self) -> None:
        check_faults()

    def weight(self, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.random(n, k, dtype=dtype).div_(k**0.5)

    def quantized(self, n: int, k: int, scheme: Scheme, scattered: bool = False) -> tuple[Packed, Tensor]:
        """A quantized weight, and its values in fp32. scattered: its groups are not neighbouring input features."""
        found = quantize(self.weight(n, k), scheme, "layer")
        if scattered:
            groups = torch.arange(k, device=self.world.device) // (k // found.scales.shape[1])
            order = torch.randperm(k, generator=self.generator, device=self.world.device)
            found = found._replace(groups=groups[order].int())
        packed = pack(*found[:4], scaled=scheme.activations == "token")
        assert packed is not None, scheme.name
        return packed, dequantize(found)

    # --- correctness ---------------------------------------------------------------------------------------------------------

    def correct(self) -> int:
        """Check the timed shapes and others, and configs with and without a split of K. Returns the number of checks."""
        bf16, fp16 = torch.bfloat16, torch.float16
        jobs: list[tuple[int, int, int, torch.dtype, Config | None]] = [
            (rows, WIDTH, k, bf16, None) for rows in (1, 2, 3, 8, 16) for k in COLUMNS.values()
        ]
        jobs += [(rows, n, k, bf16, None) for rows in (1, 2, 15) for n, k in ((1000, 1000), (258, 136))]
        jobs += [(rows, 4096, 512, fp16, None) for rows in (1, 9)]
        jobs += [(5, n, k, bf16, Mma(64, 128, 3, 3)) for n, k in ((WIDTH, 2048), (1000, 1000))]
        self.draw.shuffle(jobs)
        for rows, n, k, dtype, chosen in jobs:
            weight = self.weight(n, k, dtype)
            self.compare(f"{rows} x {n} x {k} {dtype} {chosen}", rows, weight, weight, dtype, chosen)
        return len(jobs)

    def quantized_correct(self, scheme: Scheme) -> int:
        """The same for layers that are quantized so, by both kernels."""
        bf16, fp16 = torch.bfloat16, torch.float16
        most = 8 if scheme.activations == "token" else 16  # with more, the inputs of that scheme are rounded
        jobs = [(self.draw.choice((3, 4)), WIDTH, COLUMNS["o"], bf16), (self.draw.randint(5, 8), WIDTH, COLUMNS["down"], bf16)]
        jobs += [(self.draw.randint(most // 2 + 1, most), 1000, 1152, fp16), (1, 258, 128, bf16)]
        for rows, n, k, dtype in jobs:
            weight, values = self.quantized(n, k, scheme, scattered=scheme.group == 32)
            self.compare(f"{rows} x {n} x {k} {dtype} {scheme.name}", rows, weight, values, dtype)
        return len(jobs)

    def compare(
        self, what: str, rows: int, weight: Weight, values: Tensor, dtype: torch.dtype, chosen: Config | None = None
    ) -> None:
        """Raise AssertionError unless pushed sums equal those of one-shot bit for bit, with at most twice PyTorch's error. values: the
        weight's (n, k)."""
        n, k = shape_of(weight)
        config = chosen or config_of(rows, weight, dtype)
        assert config is not None, what
        x, residual, norm = self.random(rows, k, dtype=dtype), self.common(rows, n, dtype=dtype), self.common(n, dtype=dtype)
        linear_push(x, weight, self.pushed, chosen)
        total, normed = receive_add_norm(residual, norm, 1e-5, self.pushed)
        linear_push(x, weight, self.pushed, chosen)
        alone = receive((rows, n), dtype, self.pushed)
        partial = by_itself(x, weight, config)
        expected = one_shot_add_norm(partial, residual, norm, 1e-5, self.other)
        assert torch.equal(total, expected[0]) and torch.equal(normed, expected[1]), f"{what}: other bits"
        assert torch.equal(alone, one_shot(partial, self.other)), f"{what}: other bits without the norm"
        exact = self.everyones(F.linear(x.float(), values.float())).sum(0) + residual.float()
        plain = residual + self.everyones(F.linear(x, values.to(dtype))).sum(0)
        error, allowed = ((y.float() - exact).norm().item() for y in (total, plain))
        assert error <= 2 * allowed, f"{what}: error {error}, plain {allowed}"
        bits = self.everyones(torch.stack((total, normed)).view(torch.uint8))  # a dtype that NCCL supports
        assert all(torch.equal(bits[0], others) for others in bits), f"{what}: the ranks differ"

    def replays(self, count: int) -> int:
        """Replay a CUDA graph of pushed sums with other inputs in each replay. Returns the number of replays.

        The graph itself counts the values that differ from those of the one-shot all-reduce.
        """
        rows, test = 3, Replays(self.world.device)
        inputs = {name: self.random(rows, k) for name, k in COLUMNS.items()}
        residual = self.common(rows, WIDTH)

        def layer(name: str, i: int, x: Tensor, chosen: Config | None) -> Tensor:
            weight = self.weights[name][i]
            y = inputs[name] * (test.step % 13 + 1)
            linear_push(y, weight, self.pushed, chosen)
            total, _ = receive_add_norm(x, self.norm, 1e-5, self.pushed)
            partial = by_itself(y, weight, chosen or config_of(rows, weight, y.dtype))
            expected, _ = one_shot_add_norm(partial, x, self.norm, 1e-5, self.other)
            again = one_shot(partial, self.pushed)  # the same workspace
            test.wrong.add_((total != expected).sum() + (again != one_shot(partial, self.other)).sum())
            return total

        configs: list[Config | None] = [None] * 3  # of a quantized layer: that which it takes by default
        if isinstance(self.weights["o"][0], Tensor):
            configs = [Gemv(4, 1024, 4), Mma(32, 128, 1, 8), Mma(64, 128, 3, 3)]

        def body() -> None:
            x = residual
            for i, chosen in enumerate(configs):
                x = layer("o", i, x, chosen)
                x = layer("down", i, x, chosen)

        def between() -> None:
            layer("o", 0, residual, configs[0])

        test.run(body, count, between, every=500)
        return count

    # --- times ---------------------------------------------------------------------------------------------------------------

    def ways(self, rows: int) -> dict[str, tuple[tuple[str, ...], AddNorm]]:
        """The strategies to time, by name: the layers of the chain, and the function for one layer."""

        def sum_of(partial: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return one_shot_add_norm(partial, x, self.norm, 1e-5, self.other)

        def best(y: Tensor, weight: Weight, x: Tensor) -> tuple[Tensor, Tensor]:
            return sum_of(quantized_linear(y, weight) if isinstance(weight, Packed) else linear(y, weight), x)

        def same(y: Tensor, weight: Weight, x: Tensor) -> tuple[Tensor, Tensor]:
            return sum_of(by_itself(y, weight, config_of(rows, weight, y.dtype)), x)

        def push(chosen: Config | None) -> AddNorm:
            def call(y: Tensor, weight: Weight, x: Tensor) -> tuple[Tensor, Tensor]:
                linear_push(y, weight, self.pushed, chosen)
                return receive_add_norm(x, self.norm, 1e-5, self.pushed)

            return call

        names, plain = tuple(COLUMNS), isinstance(self.weights["o"][0], Tensor)
        found: dict[str, tuple[tuple[str, ...], AddNorm]] = {}
        for layers in (names, *((name,) for name in names)):
            label = " and ".join(layers)
            found[f"{label}: linear, then one-shot"] = layers, best
            found[f"{label}: pushed"] = layers, push(None)
            if plain:  # a quantized layer by itself has the same config
                found[f"{label}: linear of the same config, then one-shot"] = layers, same
        for chosen in CANDIDATES.get(rows, []) if plain else ():
            for name in names:
                found[f"{name}: pushed by {format_config(chosen)}"] = (name,), push(chosen)
        return found

    def microseconds(self, rows: int) -> dict[str, float]:
        """µs per layer with its all-reduce, residual addition and norm, for each strategy.

        Every strategy is timed three times, alternating with the others, in a CUDA graph of a chain of layers. Returns medians.
        """
        inputs, residual = {name: self.random(rows, k) for name, k in COLUMNS.items()}, self.common(rows, WIDTH)
        found: dict[str, list[float]] = {}
        for _ in range(3):
            for what, (names, way) in self.ways(rows).items():

                def chain(names: tuple[str, ...] = names, way: AddNorm = way) -> None:
                    x = residual
                    for i in range(EACH):
                        for name in names:
                            x, _ = way(inputs[name], self.weights[name][i], x)

                if self.in_time():
                    found.setdefault(what, []).append(graph_microseconds(chain, chain=1, replays=9) / (EACH * len(names)))
        return {what: round(sorted(times)[len(times) // 2], 2) for what, times in found.items()}


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    add_gpu_options(parser, replays=2000, seconds=35.0)
    parser.add_argument(
        "--quantize",
        nargs="+",
        choices=FORMATS,
        help="check and time layers that are quantized so, instead of layers in 16 bits",
    )
    arguments = parser.parse_args()
    world = join_ranks("cuda")
    configs: dict[str, dict[int, Any]] = {}
    with torch.inference_mode():
        bench = Bench(world, arguments.seconds)
        for kind in arguments.quantize or [None]:
            label = f"{kind} " if kind else ""
            bench.use(kind)
            for scheme in FORMATS[kind] if kind else ():
                bench.part(f"correct {scheme.name}", lambda scheme=scheme: bench.quantized_correct(scheme))  # type: ignore[misc]
            if kind is None:
                bench.part("correct", bench.correct)
            bench.part(f"{label}replays", lambda: bench.replays(arguments.replays))
            for name, weights in bench.weights.items():
                found = {rows: config_of(rows, weights[0], torch.bfloat16) for rows in ROWS}
                configs[label + name] = {rows: config and format_config(config) for rows, config in found.items()}
            for rows in ROWS:
                if all(config_of(rows, weights[0], torch.bfloat16) for weights in bench.weights.values()):
                    bench.part(f"{label}µs, {rows} rows", lambda rows=rows: bench.microseconds(rows))  # type: ignore[misc]
    bench.write_gpu_report(arguments.out, configs=configs)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

"""A rank of the GPU test of row-parallel layers that push their partial sums: they must give the bits of the layer followed by a
one-shot all-reduce. The layers are Llama-70B's output and down projections over 4 ranks, in 16 bits and quantized.

    python launch.py --ranks 4 -m tests.kernels.gpu_push_rank REPORT.json
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from comms.interface import check_faults
from comms.workspace import open_workspace
from kernels.all_reduce import one_shot, one_shot_add_norm, one_shot_bytes
from kernels.linear import linear_with
from kernels.linear_config import Config, Gemv, Mma
from kernels.linear_push import linear_push, push_config, quantized_push_config, receive, receive_add_norm, shape_of
from kernels.linear_quantized import Packed, pack
from kernels.linear_quantized import linear_with as quantized_linear_with
from quantized.scheme import ON_LOAD, SCHEMES, Scheme
from quantized.weight import dequantize, quantize
from scripts.bench.comm.parts import Parts, join_ranks
from tests.support.gpu_checks import OnAllRanks, Replays
from tp import World

WIDTH = 8192  # of a residual stream
CAPACITY = 256 << 10  # bytes of a message: 16 rows
MAX_POLLS = 1 << 26  # polls before a kernel gives up: several seconds, enough for another rank to compile
COLUMNS = {"o": 2048, "down": 7168}  # columns of a layer's weight
REPLAYS = 2000
FORMATS: dict[str | None, tuple[Scheme, ...]] = {  # that are checked, by the width of the weights
    None: (),
    "fp8": (SCHEMES["fp8"], Scheme(ON_LOAD, 8, is_float=True, group=128)),
    "int8": (SCHEMES["int8"], Scheme(ON_LOAD, 8, group=64, symmetric=False)),
    "int4": (SCHEMES["int4"], Scheme(ON_LOAD, 4), Scheme(ON_LOAD, 4, group=32), Scheme(ON_LOAD, 4, group=64, symmetric=False)),
}

Weight = Tensor | Packed


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


class Checks(OnAllRanks, Parts):
    """The checks, with two workspaces: one for pushed sums, one for the one-shot all-reduces to compare with. `use` must come first."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.opened = [open_workspace(one_shot_bytes, CAPACITY, world.device) for _ in range(2)]
        for workspace in self.opened:
            workspace.exchange = replace(workspace.exchange, max_polls=MAX_POLLS)
        self.pushed, self.other = (workspace.exchange for workspace in self.opened)
        self.norm = self.common(WIDTH)
        self.weights: dict[str, Any] = {}

    def use(self, kind: str | None) -> None:
        """Take layers whose weights are quantized to this width; None: in 16 bits."""

        def one(k: int) -> Weight:
            return self.quantized(WIDTH, k, SCHEMES[kind])[0] if kind else self.weight(WIDTH, k)

        self.weights = {name: one(k) for name, k in COLUMNS.items()}

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

    def correct(self) -> int:
        """Check these shapes and others, and configs with and without a split of K. Returns the number of checks."""
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

    def replays(self) -> int:
        """Replay a CUDA graph of pushed sums with other inputs in each replay. Returns the number of replays.

        The graph itself counts the values that differ from those of the one-shot all-reduce.
        """
        rows, test = 3, Replays(self.world.device)
        inputs = {name: self.random(rows, k) for name, k in COLUMNS.items()}
        residual = self.common(rows, WIDTH)

        def layer(name: str, x: Tensor, chosen: Config | None) -> Tensor:
            weight = self.weights[name]
            y = inputs[name] * (test.step % 13 + 1)
            linear_push(y, weight, self.pushed, chosen)
            total, _ = receive_add_norm(x, self.norm, 1e-5, self.pushed)
            partial = by_itself(y, weight, chosen or config_of(rows, weight, y.dtype))
            expected, _ = one_shot_add_norm(partial, x, self.norm, 1e-5, self.other)
            again = one_shot(partial, self.pushed)  # the same workspace
            test.wrong.add_((total != expected).sum() + (again != one_shot(partial, self.other)).sum())
            return total

        configs: list[Config | None] = [None] * 3  # of a quantized layer: that which it takes by default
        if isinstance(self.weights["o"], Tensor):
            configs = [Gemv(4, 1024, 4), Mma(32, 128, 1, 8), Mma(64, 128, 3, 3)]

        def body() -> None:
            x = residual
            for chosen in configs:
                x = layer("down", layer("o", x, chosen), chosen)

        def between() -> None:
            layer("o", residual, configs[0])

        test.run(body, REPLAYS, between, every=500)
        return REPLAYS


def main() -> None:
    world = join_ranks("cuda")
    with torch.inference_mode():
        checks = Checks(world)
        for kind, schemes in FORMATS.items():
            checks.use(kind)
            if kind is None:
                checks.part("correct", checks.correct)
            for scheme in schemes:
                checks.part(f"correct {scheme.name}", lambda scheme=scheme: checks.quantized_correct(scheme))  # type: ignore[misc]
            checks.part(f"replays {kind}", checks.replays)
    checks.write_gpu_report(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

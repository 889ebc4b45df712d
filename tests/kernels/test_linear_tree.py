"""Linear layers that are summed in a fixed tree: the kernel bit for bit against PyTorch in the interpreter, and against itself with
other rows, tiles and shards on a GPU."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import ordered_dots
from tests.support.ranks import Ranks
from tests.support.replays import wrong_replays

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tree(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """The definition. Products are added in fp32 in the order of the columns; sums of parts and the tree's nodes are rounded."""
    leaves = []
    for own, columns in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True):
        sums = torch.zeros(len(x), len(weight))
        for k in range(own.shape[1]):
            sums += own[:, k, None].float() * columns[:, k].float()
        leaves.append((sums if bias is None else sums + bias.float() / parts).to(x.dtype))
    while len(leaves) > 1:
        leaves = [(a.float() + b.float()).to(x.dtype) for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def operands(rows: int, n: int, k: int, dtype: torch.dtype, device: str, biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values of very different sizes, so that another order of the sums shows. Rows of x may lie apart, and off 16 bytes."""

    def values(*shape: int) -> Tensor:
        return (torch.randn(shape) * torch.exp2(torch.randint(-4, 4, shape).float())).to(device, dtype)

    x = values(rows, k + 8)[:, random.choice([0, 3]) :][:, :k]
    return x, values(n, k), values(n) if biased else None


def mismatches(seed: int) -> list[str]:
    """In the interpreter: cases in which the kernel's bits are not those of the definition, or fused SwiGLU's are others than apart."""
    from kernels import activation
    from kernels.linear_tree import Tile, linear, linear_with
    from tests.support.kernels import kernels_always

    torch.manual_seed(seed)
    random.seed(seed)
    found = []
    tiles = [Tile(64, 32, 32, 2), Tile(64, 32, 32, 2, split=2), Tile(128, 64, 64, 3, 8), Tile(64, 64, 16, 2, split=8)]
    with kernels_always(activation), ordered_dots():
        for parts, k, n in [
            *random.sample([(8, 256, 72), (8, 128, 33), (4, 96, 64), (2, 200, 40), (8, 24, 20)], 2),
            (1, 100, 48),
        ]:
            rows, tile, dtype = random.randint(1, 70), random.choice(tiles), random.choice([torch.float32, torch.float16])
            x, weight, bias = operands(rows, n, k, dtype, "cpu", random.random() < 0.5)
            name = f"{rows} x {n} x {k} {dtype} {parts} parts {tile}"
            if not torch.equal(linear_with(x, weight, bias, parts, False, tile), tree(x, weight, bias, parts)):
                found.append(name)
            if parts == 1 and not torch.equal(linear(x, weight, bias, swiglu=True), activation.swiglu(linear(x, weight, bias))):
                found.append(name + " swiglu")
    return found


def test_bits_of_the_definition_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(mismatches, seed) == [], seed


def refusal(parts: int, k: int) -> str:
    from kernels.linear_tree import linear

    try:
        linear(torch.zeros(1, k), torch.zeros(4, k), None, parts)
    except ValueError as error:
        return str(error)
    return ""


def test_parts_that_are_not_equal_are_refused(interpreters: Ranks) -> None:
    assert "100 in_features cannot be summed in 8 equal parts" in interpreters.call(refusal, 8, 100)


@pytest.mark.parametrize(
    ("rows", "n", "k", "parts", "dtype", "taken"),
    [
        (1024, 4096, 4096, 8, torch.bfloat16, True),  # 128 tiles
        (320, 4096, 4096, 8, torch.bfloat16, False),  # 48
        (1024, 4096, 4096, 8, torch.float32, False),
        (1024, 4096, 4224, 8, torch.float16, False),  # parts of 528, which are no multiple of 64
        (1024, 4097, 4096, 8, torch.float16, False),  # words of two features would cross rows
    ],
)
def test_when_specialized_warps_are_taken(
    rows: int, n: int, k: int, parts: int, dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.linear_tree_hopper import preferred

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x, weight = torch.empty(rows, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    assert preferred(x, weight, None, parts) is taken
    assert not preferred(x, weight, torch.empty(n, dtype=dtype), parts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not preferred(x, weight, None, parts)


# --- GPU ----------------------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize(("n", "k", "parts"), [(1024, 4096, 1), (512, 3584, 8), (200, 584, 1), (96, 1032, 4), (264, 2048, 2)])
def test_bits_on_a_gpu_do_not_depend_on_rows_or_tiles(
    n: int, k: int, parts: int, in_turn: Callable[..., Any], seed: int
) -> None:
    """Random rows of 1 to 300, in a random order, with every tile, also with whole layers in shards, and close to fp64."""
    from kernels.activation import swiglu
    from kernels.linear_tree import TILES, linear, linear_with

    dtype = in_turn([torch.bfloat16, torch.float16], n)
    x, weight, bias = operands(300, n, k, dtype, "cuda", biased=True)
    with torch.no_grad():
        whole = linear(x, weight, bias, parts)
        exact = x.double() @ weight.double().T + bias.double()  # type: ignore[union-attr]
        assert (whole.double() - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()
        gated = swiglu(whole)
        for column, row, pairs in TILES.values():
            chosen = torch.randperm(300, device="cuda")[: random.randint(1, 300)]
            for tile in {column, row}:
                assert torch.equal(linear_with(x[chosen], weight, bias, parts, False, tile), whole[chosen]), tile
            if parts == 1:
                assert torch.equal(linear_with(x[chosen], weight, bias, 1, True, pairs), gated[chosen]), pairs
        if parts > 1:
            shards = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
            left, right = (linear(a, b.contiguous(), bias / 2, parts // 2) for a, b in shards)  # type: ignore[operator]
            assert torch.equal(left + right, whole)


@GPU
@pytest.mark.parametrize(("n", "k", "parts"), [(8192, 1024, 8), (4104, 3584, 8), (6150, 2048, 2), (5000, 1024, 4)])
def test_many_rows_on_a_gpu_have_the_bits_of_few(n: int, k: int, parts: int, in_turn: Callable[..., Any], seed: int) -> None:
    """The kernel for many rows against that for few, and against PyTorch's additions of the parts."""
    from kernels.linear_tree import MANY_ROWS, linear
    from kernels.linear_tree_hopper import preferred

    dtype, rows = in_turn([torch.bfloat16, torch.float16], n), random.randint(800, 1500)
    _, weight, _ = operands(1, n, k, dtype, "cuda", biased=False)
    x = operands(n, rows, k, dtype, "cuda", biased=False)[1]  # with rows that TMA can load
    assert preferred(x, weight, None, parts) or torch.cuda.get_device_capability()[0] != 9
    with torch.no_grad():
        many = linear(x, weight, None, parts)
        assert torch.equal(many, torch.cat([linear(few, weight, None, parts) for few in x.split(MANY_ROWS)]))
        leaves = [linear(a, b.contiguous(), None) for a, b in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)]
        while len(leaves) > 1:
            leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
        assert torch.equal(many, leaves[0])


@GPU
def test_a_captured_layer_on_a_gpu_repeats_its_bits(seed: int) -> None:
    from kernels.linear_tree import linear

    with torch.no_grad():
        x, weight, _ = operands(16, 4096, 2048, torch.bfloat16, "cuda", biased=False)
        assert wrong_replays(lambda: linear(x, weight, None, 8), x.normal_) == 0, seed

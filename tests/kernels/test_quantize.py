"""The quantizers against a NumPy version of the paper's definition, value by value, and the Triton kernels against them."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comms import parse_scheme
from comms.quantize import (
    Format,
    dequantize_sum,
    dequantize_sum_reference,
    hadamard_transform,
    quantize,
    quantize_reference,
    relative_error,
    wire_bytes,
)
from errors import UserError
from tests import ROOT
from tests.support.ranks import Ranks

DOCUMENTED = (ROOT / "docs" / "communication.md").read_text()
INT8, INT4, FP8 = Format(8), Format(4), Format(8, floating=True)
FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8, "int8 symmetric": Format(8, True), "int4 symmetric": Format(4, True)}

# --- the definition, in NumPy ----------------------------------------------------------------------------------------------

E4M3 = np.array([(c % 8) * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)])


def up_to_bf16(x: np.float32) -> np.float32:
    """The smallest bf16 number that is not below x."""
    near = torch.tensor(x).bfloat16()
    if near.float().item() < x:
        near = torch.nextafter(near, torch.tensor(torch.inf, dtype=torch.bfloat16))
    return np.float32(near.float().item())


def nearest_e4m3(x: np.float32) -> float:
    """The nearest e4m3 value. Of two equally near values, the one with the even code."""
    distance = np.abs(E4M3 - abs(float(x)))
    nearest = np.flatnonzero(distance == distance.min())
    return float(np.copysign(E4M3[nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]], x))


def define(x: np.ndarray, width: Format) -> tuple[np.ndarray, float]:
    """(A group of fp32 values quantized and dequantized, its scale), by the paper's appendix A.3 and the two additions that
    `comms.quantize` documents."""
    f32, n = np.float32, width.bits
    if not np.isfinite(x).all():
        return np.full_like(x, np.nan), np.nan
    low, high, largest = x.min(), x.max(), np.abs(x).max()
    if width.floating:
        scale = largest / f32(448)
    elif width.symmetric:
        scale = largest / f32(2 ** (n - 1) - 1)
    else:
        scale = max(high / f32(2**n - 1) - low / f32(2**n - 1), largest / f32(32767))
    scale = up_to_bf16(scale)
    if scale == 0:
        return np.zeros_like(x), 0.0
    if width.floating:
        return np.array([f32(nearest_e4m3(v / scale)) * scale for v in x], f32), float(scale)
    if width.symmetric:
        codes = np.clip(np.rint(x / scale), -(2 ** (n - 1)), 2 ** (n - 1) - 1)
        return (codes * scale).astype(f32), float(scale)
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(x / scale) + zero, 0, 2**n - 1)
    return ((codes - zero) * scale).astype(f32), float(scale)


def defined(x: Tensor, width: Format) -> Tensor:
    """(G, group), quantized and dequantized by `define`: fp32."""
    return torch.from_numpy(np.stack([define(row.float().numpy(), width)[0] for row in x]))


def read_again(x: Tensor, width: Format) -> Tensor:
    return dequantize_sum(quantize(x, width)[None], width)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0, torch.inf, -torch.inf), b.nan_to_num(0, torch.inf, -torch.inf)
    )


# --- groups of any finite values -------------------------------------------------------------------------------------------


@st.composite
def groups(draw: st.DrawFn) -> np.ndarray:
    """Values of any magnitude around any offset, some of them equal, zero or outliers."""
    size = 4 * draw(st.integers(1, 10))
    spread, offset = 10.0 ** draw(st.integers(-30, 30)), draw(st.sampled_from([0.0, 1.0, -3.0, 1e3, -1e6]))
    values = draw(st.lists(st.floats(-1, 1, width=32) | st.sampled_from([0.0, -1.0, 1.0, 100.0]), min_size=size, max_size=size))
    return ((np.array(values) + offset) * spread).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(x=groups())
def test_a_group_is_what_the_definition_says(name: str, x: np.ndarray) -> None:
    width = FORMATS[name]
    expected, _ = define(x, width)
    got = read_again(torch.from_numpy(x)[None], width)[0].numpy()
    assert np.array_equal(got, expected), (x, got, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_make_their_group_nan(name: str, bad: float, seed: int) -> None:
    x = torch.randn(5, 32)
    x[1, random.randrange(32)] = bad
    x[3] = bad
    got = read_again(x, FORMATS[name])
    assert got.isnan().all(dim=1).tolist() == [False, True, False, True, False]
    assert same(got, defined(x, FORMATS[name]))
    assert got[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_are_added_in_order_in_fp32(name: str, n: int, seed: int) -> None:
    x = torch.randn(n, 4, 64) * 10.0 ** torch.randint(-3, 4, (n, 1, 1))
    expected = torch.zeros(4, 64)
    for rank in x:
        expected = expected + defined(rank, FORMATS[name])
    records = torch.stack([quantize(rank, FORMATS[name]) for rank in x])
    assert torch.equal(dequantize_sum(records, FORMATS[name]), expected)


# --- bytes -----------------------------------------------------------------------------------------------------------------


def test_wire_bytes_by_hand() -> None:
    assert wire_bytes(1000, INT8, 128) == 8 * (128 + 4)
    assert wire_bytes(1000, INT4, 128) == 8 * (64 + 4)
    assert wire_bytes(1000, FP8, 128) == 8 * (128 + 2)
    assert wire_bytes(1024, Format(4, symmetric=True), 32) == 32 * (16 + 2)
    assert wire_bytes(0, INT8, 128) == 0
    # 8192 values on 4 ranks in int6: each rank sends 16 groups in int4 and 16 in int8 to each of the 3 others
    assert parse_scheme("int6").sent_bytes(8192, 128, 4) == 3 * 16 * (68 + 132)
    assert parse_scheme("int6").sent_bytes(1, 128, 4) == 3 * (68 + 132)
    assert parse_scheme("int6").sent_bytes(8192, 128, 1) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_records_have_the_bytes_that_are_counted(name: str, seed: int) -> None:
    for group in (4, 32, 128, 192):
        assert quantize(torch.randn(7, group), FORMATS[name]).nbytes == wire_bytes(7 * group, FORMATS[name], group)


def test_two_codes_share_a_byte() -> None:
    x = torch.arange(16.0)[torch.tensor([3, 15, 0, 8, 1, 2, 14, 9])][None]  # scale 1, zero point 0
    assert quantize(x, INT4)[0].tolist() == [0x80, 0x3F, 0, 0, 0x13, 0x2F, 0xE0, 0x98]


# --- the Hadamard transform --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "block"), [(16, 16), (128, 128), (192, 64), (12, 4)])
def test_rotation_is_sylvesters_matrix_and_its_own_inverse(group: int, block: int, seed: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    x = torch.randn(5, group)
    expected = x.double().view(5, -1, block) @ torch.from_numpy(matrix) / block**0.5
    assert (hadamard_transform(x) - expected.view(5, group)).abs().max() < 1e-5
    assert (hadamard_transform(hadamard_transform(x)) - x).abs().max() < 1e-5


# --- names -------------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert parse_scheme("int8") == parse_scheme("int8:128")
    assert parse_scheme("int8:128").name == "int8"
    int6 = parse_scheme("int6:32")
    assert (int6.reduce, int6.gather, int6.group, int6.hadamard, int6.name) == (INT4, INT8, 32, False, "int6:32")
    assert parse_scheme("fp8").reduce == parse_scheme("fp8").gather == FP8
    full = parse_scheme("int4:token:symmetric:hadamard")
    assert (full.reduce, full.group, full.hadamard) == (Format(4, symmetric=True), None, True)
    assert parse_scheme(full.name) == full
    assert full.group_of(torch.zeros(2, 3, 192)) == 192


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int8:100", ["'100'", "power of two"]),
        ("int8:8", ["'8'", "16"]),
        ("int8:8192", ["4096"]),
        ("int8:²", ["'²'"]),
        ("int8:", ["''", "token"]),
        ("int4:64:rotated", ["symmetric", "hadamard"]),
        ("int4:hadamard:64", ["after the group"]),
        ("int4:64:hadamard:hadamard", ["symmetric, hadamard or both"]),
    ],
)
def test_bad_names(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_scheme(text)
    assert all(word in str(error.value) for word in [f"--comm {text}", *words])


# --- the kernels --------------------------------------------------------------------------------------------------------------


def mismatches(seed: int, device: str) -> list[str]:
    """The cases in which the Triton kernels give other bytes or other sums than the PyTorch definition."""
    from kernels import quantize as kernel

    torch.manual_seed(seed)
    found = []
    shapes = [(group, torch.float32) for group in (4, 128, 192)] + [(64, torch.bfloat16), (32, torch.float16)]
    for name, width in FORMATS.items():
        for group, dtype in shapes:
            scale = 10.0 ** torch.randint(-3, 3, (3, 9, 1))
            x = (torch.randn(3, 9, group) + torch.randint(-2, 3, (3, 9, 1))) * scale
            x[0, 0], x[1, 0], x[0, 1], x[0, 2, 1], x[1, 3, 2] = 0, -0.0, -3, torch.nan, torch.inf
            x[2, 4] = torch.arange(group) % 31 - 15.5  # values halfway between two codes
            x = x.to(dtype)
            expected = quantize_reference(x.flatten(0, 1), width)
            flags = width.bits, width.symmetric, width.floating
            records = kernel.quantize(x.flatten(0, 1).to(device), *flags)
            if not torch.equal(records.cpu(), expected):
                found.append(f"quantize {name} {group} {dtype}")
            by_rank = expected.unflatten(0, (3, 9))
            if not same(kernel.dequantize_sum(by_rank.to(device), *flags).cpu(), dequantize_sum_reference(by_rank, width)):
                found.append(f"dequantize_sum {name} {group} {dtype}")
    return found


def test_kernels_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(mismatches, seed, "cpu") == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu(seed: int) -> None:
    assert mismatches(seed, "cuda") == []


@pytest.mark.parametrize(("name", "stated"), [("int8", "0.0084"), ("fp8", "0.036"), ("int6", "0.10"), ("int4", "0.14")])
def test_the_errors_that_the_documentation_states(name: str, stated: str) -> None:
    """docs/communication.md states each width's error on two ranks and which error budget admits it."""
    assert f"`{name}` has {stated}" in DOCUMENTED or f"`{name}` {stated}" in DOCUMENTED
    assert relative_error(parse_scheme(name), 2) == pytest.approx(float(stated), abs=0.5 * 10 ** -len(stated.partition(".")[2]))

"""Activations in 8 bits: their codes against the definition, wherever they are made, and a model that reads them."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from comms import Local, Residual
from config import ModelConfig
from kernels import activation, linear_quantized, norm
from kernels.linear_config import Format
from kernels.row_codes import RowCodes, quantize_rows
from layers.attention import AttentionContext
from layers.linear import ACTIVATIONS, ShardedLinear, geglu
from model import Transformer
from quantized.scheme import SCHEMES, on_load
from quantized.weight import quantize, quantized_input
from tests.support.gpus import needs_hopper
from tests.support.kernels import codes_as_on_a_gpu, kernels_always
from tests.support.ranks import Ranks

EPS = 1e-5

# --- codes --------------------------------------------------------------------------------------------------------------------


def values_of(codes: RowCodes, kind: str = "fp8") -> Tensor:
    """What the codes stand for, in fp64, with the features in their order."""
    fmt = Format(kind)
    packed = linear_quantized.Packed(
        fmt, *codes.codes.shape, codes.codes.view(torch.int16), torch.ones_like(codes.scales[:, 0])
    )
    return linear_quantized.dequantize(packed, torch.float32).double() * codes.scales.double()


def code_faults(x: Tensor) -> list[str]:
    """Each row's largest value becomes 448, and each value is at most half a step of e4m3 off."""
    got, rows = quantize_rows(x), x.reshape(-1, x.shape[-1]).double()
    largest = rows.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    found = [] if torch.allclose(got.scales.double(), scales, rtol=1e-6) else ["scales"]
    half_step = torch.maximum(rows.abs() / 16, scales / 1024)
    if ((values_of(got) - rows).abs() > half_step * (1 + 1e-5)).any() or got.shape != x.shape:
        found.append(f"codes {tuple(x.shape)}")
    return found


def same(name: str, got: RowCodes, plain: Tensor) -> list[str]:
    """The codes of the rounded activation, bit by bit."""
    expected = quantize_rows(plain)
    equal = torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    return [] if equal and torch.equal(got.scales, expected.scales) and got[2:] == expected[2:] else [name]


def faults(seed: int, device: str, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(seed)
    found = []
    with kernels_always(norm, activation), codes_as_on_a_gpu():
        for shape in ((3, 2, 112), (1, 4096), (5, 16)):
            x, update = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
            x[0] = update[0] = 0
            weight = torch.randn(shape[-1], device=device).to(dtype)
            found += code_faults(x) + code_faults(torch.randn(4, shape[-1] + 48, device=device).to(dtype)[:, 16:-32])
            total, plain = norm.add_rms_norm(x, update, weight, EPS)
            got_total, got = norm.add_rms_norm_codes(x, update, weight, EPS)
            found += same(f"norm {shape}", got, plain) + ([] if torch.equal(got_total, total) else [f"sum {shape}"])
            gate_up = torch.randn(*shape[:-1], 2 * shape[-1] + 8, device=device).to(dtype)[..., 8:] * 4
            found += same(f"swiglu {shape}", activation.swiglu_codes(gate_up), activation.swiglu(gate_up))
            found += same(f"geglu {shape}", activation.swiglu_codes(gate_up, True), activation.geglu(gate_up))
    return found


def not_finite(seed: int, device: str, dtype: torch.dtype) -> list[str]:
    """Where rows with a NaN or an infinity become other values than by the definition, in which all of such a row is NaN."""
    torch.manual_seed(seed)
    x, update = (torch.randn(6, 112, device=device).to(dtype) for _ in range(2))
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        update[row, torch.randint(112, ())] = value
    ones = torch.ones(112, device=device, dtype=dtype)
    kinds = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
    with kernels_always(norm, activation), codes_as_on_a_gpu():
        made = {
            **{name: (name, quantize_rows(update, kind), update) for name, kind in kinds.items()},
            "norm": ("fp8", norm.add_rms_norm_codes(x, update, ones, EPS)[1], norm.add_rms_norm(x, update, ones, EPS)[1]),
            "swiglu": ("fp8", activation.swiglu_codes(torch.cat([x, update], -1)), x.float().sigmoid() * x.float() * update),
        }
    found = []
    for name, (kind, codes, values) in made.items():
        weight = torch.zeros(1, 112, device=device)
        scheme = replace(SCHEMES[kind], activations="token")
        expected = quantized_input(values.to(dtype), scheme, quantize(weight, replace(scheme, format="plain"), "layer"))
        got = values_of(codes, kind)
        if not (torch.equal(got.isnan(), expected.isnan()) and got[:3].isnan().all() and got[3:].isfinite().all()):
            found.append(name)
    return found


def test_values_that_are_not_finite_stay_so_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(not_finite, seed, "cpu", torch.float16) == []


@needs_hopper
def test_values_that_are_not_finite_stay_so_on_a_gpu(seed: int) -> None:
    assert not_finite(seed, "cuda", torch.bfloat16) == []


def test_codes_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(faults, seed, "cpu", torch.float16) == []


@needs_hopper
def test_codes_on_a_gpu(seed: int) -> None:
    assert faults(seed, "cuda", torch.bfloat16) == []


# --- in a model ---------------------------------------------------------------------------------------------------------------


class Heads(torch.nn.Module):
    """Attention's place: any function of the queries."""

    def forward(self, qkv: Tensor, frequencies: Tensor, context: object) -> Tensor:
        return qkv[..., :128] * 0.5


def exact_product(codes: Tensor, weight: Tensor, scales: Tensor, weight_scales: Tensor, **_: object) -> Tensor:
    return (codes.double() @ weight.double() * scales * weight_scales).bfloat16()


def residual_streams(seed: int, device: str, variant: str) -> list[str]:
    """Where a model of fp8 weights, with 70 rows, has other bits than one whose layers quantize their inputs themselves."""
    torch.manual_seed(seed)
    ladder = {"ladder_layers": (0, 1)} if variant == "ladder" else {}
    config = ModelConfig(
        vocab_size=64, hidden_size=128, intermediate_size=160, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=64, max_seq_len=128,
        variant="standard" if variant == "geglu" else variant,
        quantization=on_load("fp8"), **ladder,
    )  # fmt: skip
    with mock.patch.dict(ACTIVATIONS, {"silu": geglu} if variant == "geglu" else {}):
        model = Transformer(config, Local(), torch.device(device), torch.bfloat16).eval().requires_grad_(False)
    layers = [module for module in model.modules() if isinstance(module, ShardedLinear)]
    product = torch._scaled_mm if device == "cuda" else exact_product
    supported = mock.patch("layers.linear.packs_on_gpu", return_value=True)
    always = kernels_always(norm, activation, linear_quantized)
    with always, codes_as_on_a_gpu(), supported, mock.patch("torch._scaled_mm", product):
        for layer in layers:
            for _, part in layer.quantized_parts():
                weight = torch.randn(part.n, part.k, device=device).bfloat16() / part.k**0.5
                part.fill(quantize(weight, part.scheme, "layer"))
            layer.pack(torch.bfloat16)
        for block in model.layers:
            for owner in (block, getattr(block, "attention", block)):
                if hasattr(owner, "heads"):
                    owner.heads = Heads()
        x = torch.randn(1, 70, 128, device=device).bfloat16()

        def run() -> Tensor:
            stream = Residual(x, Local())
            for block in model.layers:
                stream = block(stream, model.frequencies, AttentionContext)
            return stream.finish()

        kinds: list[type] = []
        usual = ShardedLinear.forward

        def forward(self: ShardedLinear, x: Tensor | RowCodes) -> object:
            kinds.append(type(x))
            return usual(self, x)

        with mock.patch.object(ShardedLinear, "forward", forward):
            got = run()
        with mock.patch.object(ShardedLinear, "reads_codes", return_value=False):
            expected = run()
    # the input of a down projection, and of each first layer but the model's
    wanted = {"parallel": 1 + 2, "ladder": 2 + 2, "standard": 3 + 2, "geglu": 3 + 2}[variant]
    found = [] if kinds.count(RowCodes) == wanted else [f"{kinds.count(RowCodes)} activations in 8 bits, not {wanted}"]
    return found + ([] if torch.equal(got, expected) and bool(got.isfinite().all()) else ["other bits"])


VARIANTS = ("standard", "parallel", "ladder", "geglu")


def test_a_model_in_the_interpreter(interpreters: Ranks, in_turn: Callable[..., str], seed: int) -> None:
    assert interpreters.call(residual_streams, seed, "cpu", in_turn(VARIANTS, 0)) == []


@needs_hopper
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_on_a_gpu(variant: str, seed: int) -> None:
    assert residual_streams(seed, "cuda", variant) == []

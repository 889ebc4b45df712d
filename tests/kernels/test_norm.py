"""RMSNorm, SwiGLU, and RoPE with its write to the KV cache: the PyTorch references against fp64, the kernels against both."""

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import activation, norm, rope_cache
from kernels.activation import geglu_reference, swiglu_reference
from kernels.norm import add_rms_norm_reference, rms_norm_backward, rms_norm_reference
from kernels.rope_cache import rope_store_reference
from tests.support.kernels import codes_as_on_a_gpu, kernels_always, worse
from tests.support.ranks import Ranks

EPS = 1e-5

# --- the definitions, in fp64 ------------------------------------------------------------------------------------------------


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def swiglu64(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def geglu64(gate_up: Tensor) -> Tensor:
    """Hendrycks & Gimpel, arXiv:1606.08415, section 2."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return 0.5 * gate * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up


def rotate64(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """RoPE of x (T, heads, D) in fp64, with feature pairs (i, i + D / 2) as complex numbers. Angles are rounded to fp32, as in
    all implementations here."""
    a, b = x.double().chunk(2, dim=-1)
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    rotated = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def same(name: str, got: Tensor, expected: Tensor) -> list[str]:
    return [] if torch.equal(got, expected) else [f"{name}: not the same bits"]


# --- comparisons for references and kernels ------------------------------------------------------------------------------


def norm_faults(norm: Callable, add_norm: Callable, device: str, dtype: torch.dtype) -> list[str]:
    found = []
    for shape in ((3, 5, 100), (2, 8192), (1, 1, 64), (4, 1), (7, 640), (0, 32)):
        x, update = (torch.randn(shape, device=device).to(dtype) * random.choice([0.01, 1, 30]) for _ in range(2))
        weight = torch.randn(shape[-1], device=device).to(dtype)
        wide = torch.randn(*shape[:-1], shape[-1] + 24, device=device).to(dtype)
        name = f"{dtype} {shape}"
        total, normed = add_norm(x, update, weight, EPS)
        found += same(f"sum {name}", total, x + update)
        found += same(f"norm of the sum {name}", normed, norm(total, weight, EPS))
        if x.numel():
            for part in (x, wide[..., 16:-8]):  # the second has gaps between its rows
                plain = F.rms_norm(part, part.shape[-1:], weight, EPS)
                found += worse(f"norm {name}", norm(part, weight, EPS), plain, norm64(part, weight))
    return found


def norm_backward_faults(backward: Callable, device: str, dtype: torch.dtype) -> list[str]:
    """Gradients of the norm beside PyTorch's, and autograd's of the definition in fp64."""
    found = []
    for shape in ((3, 5, 100), (2, 8192), (1, 1, 64), (4, 1), (70, 640), (0, 32)):
        wide = torch.randn(*shape[:-1], shape[-1] + 24, device=device).to(dtype) * random.choice([0.01, 1, 30])
        gradient, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
        for name, x in ("whole", wide[..., : shape[-1]].contiguous()), ("with gaps", wide[..., 16:-8]):
            got = backward(x, weight, gradient, EPS)
            inputs = [part.detach().requires_grad_() for part in (x, weight)]
            exact_inputs = [part.detach().double().requires_grad_() for part in (x, weight)]
            with torch.enable_grad():
                plain = torch.autograd.grad(F.rms_norm(inputs[0], weight.shape, inputs[1], EPS), inputs, gradient)
                exact = torch.autograd.grad(norm64(*exact_inputs), exact_inputs, gradient.double())
            for what, *three in zip(("x", "weight"), got, plain, exact, strict=True):
                if three[0].numel():
                    found += worse(f"gradient of {what} {name} {dtype} {shape}", *three)
    return found


def gated_faults(swiglu: Callable, geglu: Callable, device: str, dtype: torch.dtype) -> list[str]:
    found = []
    for shape in ((3, 2, 100), (2, 7168), (1, 2), (9, 2050)):
        whole = torch.randn(*shape[:-1], shape[-1] + 32, device=device).to(dtype) * 4
        gate_up = whole[..., 32:]
        gate, up = gate_up.chunk(2, dim=-1)
        found += worse(f"swiglu {dtype} {shape}", swiglu(gate_up), F.silu(gate) * up, swiglu64(gate_up))
        found += worse(f"geglu {dtype} {shape}", geglu(gate_up), F.gelu(gate, approximate="tanh") * up, geglu64(gate_up))
    return found


def rope_faults(rope_store: Callable, device: str, dtype: torch.dtype) -> list[str]:
    found = []
    for n_heads, n_kv_heads, head_dim, normed, tokens in (
        (8, 2, 128, False, 7),
        (3, 1, 96, True, 3),
        (6, 6, 16, True, 70),
        (5, 1, 256, False, 1),
        (1, 1, 20, True, 2),
    ):
        name, rows = f"rope {dtype} {n_heads} {n_kv_heads} {head_dim}", 2 * tokens + 1
        features = (n_heads + 2 * n_kv_heads) * head_dim
        qkv = torch.randn(tokens, features + 8, device=device).to(dtype)[:, :features]
        positions = torch.randint(0, 20000, (tokens,), device=device)
        frequencies = (1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)).to(device)
        cache_rows = torch.randperm(rows, device=device)[:tokens]
        padding = torch.zeros(tokens, dtype=torch.bool, device=device)
        padding[tokens // 2] = tokens > 1
        cache_rows[padding] = -1
        cache = [torch.randn(rows, n_kv_heads, head_dim, device=device).to(dtype) for _ in range(2)]
        weights = [torch.randn(head_dim, device=device).to(dtype) if normed else None for _ in range(2)]
        expected = [x.clone() for x in cache]
        plain = [x.clone() for x in cache]
        queries = rope_store(qkv, positions, frequencies, cache_rows, *cache, *weights, EPS)

        q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((n_heads, n_kv_heads, n_kv_heads), dim=1)
        plain_q = rope_store_reference(qkv, positions, frequencies, cache_rows, *plain, *weights, EPS)
        if weights[0] is not None and weights[1] is not None:
            q, k = (norm64(x, w) for x, w in zip((q, k), weights, strict=True))
        found += worse(f"{name} q", queries, plain_q, rotate64(q, positions, frequencies))
        stored = cache_rows[~padding]
        exact_k = rotate64(k, positions, frequencies)[~padding]
        found += worse(f"{name} k", cache[0][stored], plain[0][stored], exact_k)
        expected[1][stored] = v[~padding]
        found += same(f"{name} v", cache[1], expected[1])
        untouched = torch.ones(rows, dtype=torch.bool, device=device)
        untouched[stored] = False
        found += same(f"{name}: the rest of the cache", cache[0][untouched], expected[0][untouched])
    return found


def code_faults(rope_store: Callable, device: str, dtype: torch.dtype) -> list[str]:
    """Keys and values are stored as codes: each stands for what a cache of values gets, to half a step of e4m3."""
    found = []
    for n_heads, n_kv_heads, head_dim, size, tokens in (
        (8, 2, 128, 16, 7),
        (3, 1, 96, 8, 3),
        (1, 4, 20, 1, 5),
        (5, 1, 256, 32, 1),
    ):
        blocks = -(-2 * tokens // size) + 1
        qkv = torch.randn(tokens, n_heads + 2 * n_kv_heads, head_dim, device=device)
        qkv *= 10 ** (4 * torch.randn(tokens, n_heads + 2 * n_kv_heads, 1, device=device)).clamp(-8, 4)
        qkv[0] = 0
        qkv = qkv.clamp(-6e4, 6e4).to(dtype).flatten(1)
        positions = torch.randint(0, 20000, (tokens,), device=device)
        frequencies = (1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)).to(device)
        cache_rows = torch.randperm(blocks * size, device=device)[:tokens]
        cache_rows[-1] = -1 if tokens > 1 else cache_rows[-1]
        exact = torch.zeros(2, blocks * size, n_kv_heads, head_dim, device=device, dtype=dtype)
        codes = torch.zeros(exact.shape, device=device).to(torch.float8_e4m3fn)
        scales = torch.full((2, blocks, n_kv_heads, size), torch.nan, device=device)
        inputs = qkv, positions, frequencies, cache_rows
        queries = rope_store(*inputs, *codes, None, None, EPS, scales)
        found += same(f"queries {head_dim}", queries, rope_store(*inputs, *exact, None, None, EPS))
        stored = cache_rows[cache_rows >= 0]
        of_row = scales.transpose(2, 3).flatten(1, 2)  # (2, N * P, K)
        rest = torch.ones(blocks * size, dtype=torch.bool, device=device)
        rest[stored] = False
        found += same(f"unused scales {head_dim}", of_row[:, rest].isnan().all(), torch.tensor(True, device=device))
        found += same(f"unused codes {head_dim}", codes.float()[:, rest], torch.zeros_like(codes.float()[:, rest]))
        scale, values = of_row[:, stored][..., None], exact[:, stored].double()
        half_step = torch.maximum(values.abs() / 16, scale.double() / 1024)
        off = (codes.float()[:, stored].double() * scale - values).abs() > half_step * (1 + 1e-5)
        largest = codes.float()[:, stored].abs().amax(-1)
        used = (largest == 448) | (values.abs().amax(-1) < 1e-12)  # the whole range of the codes
        if off.any() or not used.all():
            found.append(f"codes {dtype} {head_dim}: {int(off.sum())} wrong, {int((~used).sum())} heads do not use the range")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_references(dtype: torch.dtype, seed: int) -> None:
    found = norm_faults(rms_norm_reference, add_rms_norm_reference, "cpu", dtype)
    assert (
        found + gated_faults(swiglu_reference, geglu_reference, "cpu", dtype) + rope_faults(rope_store_reference, "cpu", dtype)
        == []
    )
    assert code_faults(rope_store_reference, "cpu", dtype) == []


def faults(seed: int, device: str, dtypes: list[torch.dtype]) -> list[str]:
    """The cases in which the Triton kernels are wrong or their error is too large."""
    torch.manual_seed(seed)
    random.seed(seed)
    found = []
    with kernels_always(norm, activation, rope_cache):
        for dtype in dtypes:
            found += norm_faults(norm.rms_norm, norm.add_rms_norm, device, dtype)
            found += norm_backward_faults(rms_norm_backward, device, dtype)
            found += gated_faults(activation.swiglu, activation.geglu, device, dtype)
            found += rope_faults(rope_cache.rope_store, device, dtype)
            with codes_as_on_a_gpu():
                found += code_faults(rope_cache.rope_store, device, dtype)
        x = torch.ones(2, 40, device=device)
        x[1, 3] = 1e25  # its square is too large for fp32
        for normed in (norm.rms_norm(x, x[0], EPS), norm.add_rms_norm(x, x, x[0], EPS)[1]):
            found += same("overflow", normed.isnan().all(1), torch.tensor([False, True], device=device))
    return found


def test_kernels_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    """In fp32 and fp16 only: the interpreter truncates to bf16, where a GPU rounds."""
    assert interpreters.call(faults, seed, "cpu", [torch.float32, torch.float16]) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu(seed: int) -> None:
    assert faults(seed, "cuda", [torch.float32, torch.float16, torch.bfloat16]) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu_uses_the_backward_kernel(seed: int) -> None:
    """Also with rows between which there are gaps, and added to other gradients of the same tensors."""
    torch.manual_seed(seed)

    def gradients(norm: Callable, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        inputs = [part.detach().requires_grad_() for part in (x, weight)]
        parts = inputs[0][:, :192], inputs[0][:, 192:]
        (norm(parts[0], inputs[1], EPS) * norm(parts[1], inputs[1], EPS) + parts[0]).square().sum().backward()
        return inputs[0].grad, inputs[1].grad  # type: ignore[return-value]

    x, weight = torch.randn(3000, 384, device="cuda"), torch.randn(192, device="cuda")
    used = torch.randn(2, 2, device="cuda", requires_grad=True)
    assert "TrainedRMSNorm" in norm.rms_norm(used, torch.ones(2, device="cuda"), EPS).grad_fn.name()
    exact = gradients(lambda x, weight, eps: norm64(x, weight), x.double(), weight.double())
    plain = gradients(lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps), x, weight)
    for what, *three in zip(("x", "weight"), gradients(norm.rms_norm, x, weight), plain, exact, strict=True):
        assert worse(what, *three) == []
    for got, expected in zip(gradients(norm.rms_norm, x.double(), weight.double()), exact, strict=True):
        torch.testing.assert_close(got, expected)  # the kernel adds in fp32, so PyTorch's

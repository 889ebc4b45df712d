"""Rotary position embeddings (Su et al., arXiv:2104.09864): the rotation, and the frequencies with a checkpoint's scaling.

Each scaling is computed in fp32 with the same order of operations as in transformers (`modeling_rope_utils.py`). With another
order, the angles would differ at positions of tens of thousands.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from config import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, ModelConfig, YarnScaling
from kernels import determinism


def rope_frequencies(config: ModelConfig) -> Tensor:
    """The frequencies for a context of `config.max_seq_len` tokens, a row for each of `ROPES`: (3, D / 2) fp32, radians a token."""
    scaled = scaled_frequencies(config)
    unscaled = replace(config, rope_theta=config.local_theta or config.rope_theta, rope_scaling=None)
    rows = torch.stack((scaled, scaled_frequencies(unscaled), torch.zeros_like(scaled)))
    return F.pad(rows, (0, (config.head_dim - config.rotary_dim) // 2))  # features that are not rotated


def scaled_frequencies(config: ModelConfig) -> Tensor:
    """The row of layers in general, for the features that are rotated."""
    dim, base, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    match scaling:
        case None:
            return 1.0 / powers(base, exponents)
        case Llama3Scaling():
            return llama3(1.0 / powers(base, exponents), scaling)
        case LinearScaling():
            return 1.0 / powers(base, exponents) / scaling.factor
        case DynamicScaling():
            return 1.0 / powers(dynamic_base(base, dim, scaling, config.max_seq_len), exponents)
        case YarnScaling():
            return yarn(base, dim, powers(base, exponents), scaling)
        case LongRopeScaling():
            beyond = config.max_seq_len > scaling.original_max_position_embeddings
            return 1.0 / (torch.tensor(scaling.long_factor if beyond else scaling.short_factor) * powers(base, exponents))


def powers(base: float, exponents: Tensor) -> Tensor:
    """base to the power of each of (D / 2,) fp32 exponents. PyTorch's vector code and its scalar code differ in last bits, so with
    --deterministic the C library computes in fp64."""
    if determinism.enabled():
        return exponents.double().apply_(lambda exponent: base**exponent).float()
    return base**exponents


def llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend in between (Llama 3.1's `apply_scaling`)."""
    wavelengths = 2 * math.pi / frequencies
    periods = scaling.original_max_position_embeddings / wavelengths  # periods within the original context
    blend = (periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: low frequency, 1: high frequency
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def dynamic_base(base: float, dim: int, scaling: DynamicScaling, length: int) -> float:
    """The RoPE base for a context of `length` tokens. Up to `scaling.trained` tokens it is `base`."""
    stretched = scaling.factor * max(length, scaling.trained) / scaling.trained - (scaling.factor - 1)
    return base * float(stretched ** (dim / (dim - 2)))


def yarn(base: float, dim: int, powers: Tensor, scaling: YarnScaling) -> Tensor:
    """Blend scaled with unscaled frequencies: the more turns in the original context, the less scaled. powers: (D / 2,)."""
    low, high = (
        dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def query_scale(positions: Tensor, growth: float, trained: int) -> Tensor:
    """By how much queries grow beyond the original context of `trained` tokens (Ministral 3): positions (T,) int64 to (T,) fp64, in
    which PyTorch's vector code and its scalar code differ by less than fp32 shows."""
    return 1 + growth * torch.log1p((positions // trained).double())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x (B, T, heads, D); cos and sin (T, 1, D / 2) fp32. Feature i pairs with i + D / 2, as in HF weights."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

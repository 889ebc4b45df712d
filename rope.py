"""Rotary position embeddings (Su et al., arXiv:2104.09864): the frequencies of a model, scaled as its checkpoint says, and the
rotation itself.

Each scaling is computed in fp32 in the order of transformers' operations (`modeling_rope_utils.py`): angles at positions in the tens
of thousands would part otherwise.
"""

import math

import torch
from torch import Tensor

from config import ModelConfig
from rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling


def rope_frequencies(config: ModelConfig) -> Tensor:
    """(D / 2,) fp32, radians a token, for the context `config.max_seq_len`."""
    dim, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    match scaling:
        case None:
            return 1.0 / base**exponents
        case Llama3Scaling():
            return llama3(1.0 / base**exponents, scaling)
        case LinearScaling():
            return 1.0 / base**exponents / scaling.factor
        case DynamicScaling():
            return 1.0 / dynamic_base(base, dim, scaling, config.max_seq_len) ** exponents
        case YarnScaling():
            return yarn(base, dim, base**exponents, scaling)
        case LongRopeScaling():
            beyond = config.max_seq_len > scaling.original_max_position_embeddings
            return 1.0 / (torch.tensor(scaling.long_factor if beyond else scaling.short_factor) * base**exponents)


def llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend in between (Llama 3.1's `apply_scaling`)."""
    wavelengths = 2 * math.pi / frequencies
    periods = scaling.original_max_position_embeddings / wavelengths  # within the original context
    blend = (periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: a low frequency, 1: a high one
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def dynamic_base(base: float, dim: int, scaling: DynamicScaling, length: int) -> float:
    """The base for a context of `length` tokens: the unscaled one up to what was trained."""
    stretched = scaling.factor * max(length, scaling.trained) / scaling.trained - (scaling.factor - 1)
    return base * float(stretched ** (dim / (dim - 2)))


def yarn(base: float, dim: int, powers: Tensor, scaling: YarnScaling) -> Tensor:
    """Interpolated frequencies, and towards those that turn often in the original context the unscaled ones. powers: (D / 2,)."""
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x (B, T, heads, D); cos and sin (T, 1, D / 2) fp32. Feature i pairs with i + D / 2, as in HF weights."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

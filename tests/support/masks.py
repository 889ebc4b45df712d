"""What a grammar allows next, without the engine's code."""

from typing import Any

import torch
from torch import Tensor


def allowed(matcher: Any, vocab_size: int) -> Tensor:
    """(V,) bool."""
    bytes_ = matcher.compute_logit_bias()
    return torch.tensor([i < len(bytes_) and bytes_[i] > 0 for i in range(vocab_size)])

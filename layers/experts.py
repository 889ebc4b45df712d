"""The MLP of a sparse model's layer: a router chooses experts for each token, and their outputs are added with its weights."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import FAMILIES, ModelConfig
from errors import UserError
from kernels.activation import clamped_swiglu, swiglu
from kernels.dispatch import on_gpu
from kernels.experts import route, sparse_mlp
from layers.linear import ShardedLinear
from tp import Shard


class Router(nn.Module):
    """Which experts a token has, and with which weights. Every rank has all of it. `weight` (experts, hidden_size); `bias` (experts,) or
    None."""

    def __init__(self, config: ModelConfig, layer: int, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        assert config.experts is not None
        self.part, self.layer, self.experts = "gate", layer, config.experts
        self.weight = nn.Parameter(torch.empty(self.experts.count, config.hidden_size, device=device, dtype=dtype))
        has_bias = FAMILIES[config.family].sparse_bias
        bias = nn.Parameter(torch.zeros(self.experts.count, device=device, dtype=dtype)) if has_bias else None
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self.counter: Tensor  # of the kernel's programs
        self.register_buffer("counter", torch.zeros(1, dtype=torch.int32, device=device), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, C) to the experts (T, chosen) int64, the likeliest first, and their weights (T, chosen) fp32. Computed in fp32; of
        equally likely experts, those with the lowest numbers."""
        return self.choose(self.logits(x))

    def logits(self, x: Tensor) -> Tensor:
        """(T, C) to (T, experts) fp32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return route(logits, self.experts.chosen, self.experts.normalized)


class SparseMLP(nn.Module):
    """h(x) = sum over the chosen experts e of p_e(x) · down_e · (silu(gate_e · x) * (up_e · x)), of the normed x. Where the config has a
    limit, the activation is `clamped_swiglu`.

    Each expert is split over the shards as a dense MLP is. A fused weight has the experts one after another. Communicators call it as a
    layer that is not fused with them (`comms.interface.Layer`).
    """

    only_called = True
    multiplied = None

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.experts is not None
        self.count, self.limit, self.out_features = config.experts.count, config.experts.limit, config.hidden_size
        if device.type == "cuda" and config.quantization:
            raise UserError("experts in 8 or 4 bits have no GPU kernels yet; use a 16-bit checkpoint, without --quantize")
        names = [f"experts.{i}" for i in range(self.count)]
        self.router = Router(config, layer, device, dtype)
        gate_up = tuple(f"{name}.{part}" for name in names for part in ("gate_proj", "up_proj"))
        self.w_gate_up = ShardedLinear(config, shard, gate_up, layer, device=device, dtype=dtype)
        self.w_down = ShardedLinear(
            config, shard, tuple(f"{name}.down_proj" for name in names), layer, device=device, dtype=dtype
        )

    def reads_codes(self, like: Tensor) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to this shard's partial sum (..., C)."""
        rows = x.reshape(-1, x.shape[-1])
        if on_gpu(x):
            router, experts = self.router, self.router.experts
            weights = router.weight, self.w_gate_up.weight, self.w_down.weight
            biases = router.bias, self.w_gate_up.whole_bias(), self.w_down.whole_bias()
            choice = experts.chosen, experts.normalized, router.counter
            return sparse_mlp(rows, *weights, *choice, biases, self.limit or 0.0).view(x.shape)
        return self._each(rows, *self.router(rows)).view(x.shape)

    def _each(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The definition: one expert after another, with the tokens (T, C) that have it."""
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        gate_up_of, down_of = self.w_gate_up.experts(), self.w_down.experts()
        for e in experts.unique().tolist():
            tokens, place = torch.where(experts == e)
            rows = x[tokens]
            gate_up = torch.cat([gate_up_of(2 * e + i, rows) for i in range(2)], -1)
            hidden = clamped_swiglu(gate_up, self.limit) if self.limit else swiglu(gate_up)
            out.index_add_(0, tokens, down_of(e, hidden) * weights[tokens, place, None])
        return out.to(x.dtype)


class Beside(NamedTuple):
    """Two layers of the same input, as one that communicators call."""

    mlp: SparseMLP
    other: ShardedLinear
    only_called: bool = True
    multiplied: None = None

    def reads_codes(self, like: Tensor) -> bool:
        return False

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mlp(x), self.other(x)

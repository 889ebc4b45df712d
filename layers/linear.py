"""Linear layers of which a rank has a shard: in 16 or 32 bits or quantized, several with the same input fused into one, with adapters."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import FAMILIES, ModelConfig
from kernels import determinism
from kernels.activation import geglu, swiglu, swiglu_codes
from kernels.dispatch import on_gpu
from kernels.linear import linear, linear_swiglu
from kernels.linear_host import supports as host_supports
from kernels.linear_quantized import Packed, reads_codes
from kernels.linear_quantized import linear as quantized_linear
from kernels.linear_quantized import supports as quantized_supports
from kernels.lora import Groups, LowRank, add_low_rank
from kernels.row_codes import RowCodes
from quantized.weight import PlainWeight, QuantizedWeight, merged
from tp import Shard, biased_parts, checkpoint_name, split_of

ACTIVATIONS = {"silu": swiglu, "gelu_pytorch_tanh": geglu}  # of (..., 2I) gate and up to (..., I), by the gate's


def packs_on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether GPU kernels compute quantized layers on this device."""
    return device.type == "cuda" and quantized_supports(dtype)


class StepAdapters:
    """Which rows of the present step have an adapter. All adapted layers of a model share it; `Transformer` sets it."""

    groups: Groups | None = None


class LayerAdapters(NamedTuple):
    """The adapters of one `ShardedLinear`. A column-parallel layer holds all of A and its features' rows of B, a row-parallel one its
    features' columns of A and all of B, so that its product is a part of the partial sum."""

    weights: LowRank
    step: StepAdapters

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """y, the layer's product of x, with the adapters' products."""
        return y if self.step.groups is None else add_low_rank(y, x, self.weights, self.step.groups)


class ShardedLinear(nn.Module):
    """This shard's part of one linear layer, or of several layers with the same input, fused into one weight.

    What communicators read of it (`only_called`, `multiplied`, …) is explained in `comms.interface.Linear`.

    layer: the number of the block, which is part of the layer's name; None for the embedding and the output layer.

    `weight` (sum of the parts' local out_features, local in_features). A column-parallel layer has some out_features and returns
    them; a row-parallel one has some in_features and returns a partial sum over shards (Megatron-LM, arXiv:1909.08053).
    gated: the parts are (gate, up), and the layer returns silu(gate) * up, or what `Family.activation` says.

    `bias` is None unless a part has a bias. A column-parallel layer holds the entries of its features, for the parts with a
    bias. A row-parallel layer holds all entries, and each of the S shards adds 1 / S of them: the sum over shards then has the
    bias once, and the streams of a desync model have equal shares of it.

    If the config says that a part is quantized, `weight` is None, and `quantized` has one module for each part.

    reader: the layer that reads a gated layer's result. It is kept in a tuple, because it is not a part of this module.

    adapters: None, or low-rank adapters, which `engine/adapters.py` sets before the first step. The layer is then computed by itself,
    without the layers and all-reduces around it in the same kernel.
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        parts: tuple[str, ...],
        layer: int | None = None,
        gated: bool = False,
        reader: "ShardedLinear | None" = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        inputs: int | None = None,
    ) -> None:
        """inputs: in_features of a column-parallel layer; None: hidden_size."""
        super().__init__()
        self.config, self.parts, self.shard, self.layer, self.gated = config, parts, shard, layer, gated
        self.readers, self.activation = (reader,) if reader else (), ACTIVATIONS[FAMILIES[config.family].activation]
        # of each part, the features that this shard has on the split axis
        self.sizes = [len(shard.range(config, split_of(p).axis)) for p in parts]
        self.dim = split_of(parts[0]).dim
        if self.dim == 0:
            shape = (sum(self.sizes), inputs or config.hidden_size)
        else:
            shape = (len(parts) * config.hidden_size, self.sizes[0])
        self.out_features, self.in_features = shape
        self.rows = self.sizes if self.dim == 0 else [config.hidden_size] * len(parts)  # out_features of each part
        self.quantized = self._quantized(config, device, dtype)
        weight = None if self.quantized else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter("weight", weight)
        # in a fused layer, either all parts have a bias, or the first ones, or the last ones
        has = [part.rpartition(".")[2] in biased_parts(config) for part in parts]
        self.biased = [part for part, biased in zip(parts, has, strict=True) if biased]
        # out_features of those with a bias
        self.lengths = [length for length, biased in zip(self.rows, has, strict=True) if biased]
        unbiased = shape[0] - sum(self.lengths)
        self.padding = (0, unbiased) if has[0] else (unbiased, 0)
        # of the sum over input features, with --deterministic
        self.sum_parts = determinism.parts(self.sizes[0] * shard.count) // shard.count if self.dim == 1 else 1
        self.bias = nn.Parameter(torch.zeros(sum(self.lengths), device=device, dtype=dtype)) if self.biased else None
        self.adapters: LayerAdapters | None = None

    def _quantized(self, config: ModelConfig, device: torch.device | None, dtype: torch.dtype | None) -> nn.ModuleList | None:
        """The parts of a layer of which at least one is quantized, else None."""
        if config.quantization is None or self.parts == ("embed_tokens",):
            return None
        schemes = [config.quantization.scheme(checkpoint_name(self.layer, part)) for part in self.parts]
        k = self.in_features
        modules = [
            QuantizedWeight(scheme, n, k, device) if scheme else PlainWeight(n, k, device, dtype)
            for scheme, n in zip(schemes, self.rows, strict=True)
        ]
        return nn.ModuleList(modules) if any(schemes) else None

    def forward(self, x: Tensor | RowCodes) -> Any:
        """(..., in_features) to (..., out_features), half of them in a gated layer, as `RowCodes` if its reader reads them."""
        if self.adapters is not None:
            assert isinstance(x, Tensor)
            return self.finish(self.adapters.add(self._product(x), x))
        if self.gated and not self.fused_gate:
            return self.finish(self._product(x))
        if (packed := self.packed) is not None:
            return quantized_linear(x, packed, self.whole_bias(), self.gated, self.finish)
        assert isinstance(x, Tensor)
        if self.gated and on_gpu(x) and not self.quantized:
            return linear_swiglu(x, self.weight, self.whole_bias())
        return self.finish(self._product(x))

    def _product(self, x: Any) -> Tensor:
        """The matrix product with its bias, (..., out_features)."""
        if (packed := self.packed) is not None:
            product: Tensor = quantized_linear(x, packed, self.whole_bias())
            return product
        if self.quantized:
            if determinism.enabled():
                return self._quantized_tree(x)
            products, bias = [part(x) for part in self.quantized], self.whole_bias()
            out = products[0] if len(products) == 1 else torch.cat(products, -1)
            return out if bias is None else out + bias
        return linear(x, self.weight, self.whole_bias(), self.sum_parts)

    def experts(self) -> Callable[[int, Tensor], Tensor]:
        """A function of the number of a part and of x (..., in_features) to their product, with the part's bias. All parts have equally
        many out_features. They are taken apart once, because autograd makes a gradient of the whole weight from that of each slice."""
        shape, bias = (len(self.parts), self.rows[0]), self.whole_bias()
        biases = None if bias is None else bias.view(shape).unbind()
        weights = None if self.quantized else self.weight.view(*shape, self.in_features).unbind()

        def product(index: int, x: Tensor) -> Tensor:
            own = None if biases is None else biases[index]
            if weights is not None:
                return F.linear(x, weights[index], own)
            assert self.quantized is not None
            out: Tensor = self.quantized[index](x)
            return out if own is None else out + own

        return product

    def _quantized_tree(self, x: Tensor) -> Tensor:
        """The product with --deterministic."""
        assert self.quantized is not None
        bias, sizes = self.whole_bias(), self.rows
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat(
            [
                part.tree(x, own, self.sum_parts)  # type: ignore[operator]
                for part, own in zip(self.quantized, biases, strict=True)
            ],
            -1,
        )

    @property
    def packed(self) -> Packed | None:
        """The weight of a quantized layer as the kernels of this GPU read it; None if they do not."""
        return getattr(self.quantized[0], "packed", None) if self.quantized and len(self.quantized) == 1 else None

    def reads_codes(self, like: Tensor) -> bool:
        """Whether an input with the rows (..., any) and the data type of `like` may be `RowCodes`."""
        packed = None if self.adapters else self.packed
        return packed is not None and reads_codes(packed, like)

    def gate(self, gate_up: Tensor) -> Tensor | RowCodes:
        """silu(gate) * up of (..., 2 * in_features), or what `Family.activation` says, as this layer reads it."""
        return swiglu_codes(gate_up, self.activation is geglu) if self.reads_codes(gate_up) else self.activation(gate_up)

    def pack(self, dtype: torch.dtype) -> None:
        """Prepare quantized parts that are filled for the kernels of this GPU or CPU: as one weight if all are quantized alike.

        dtype: of the inputs. Without such kernels, PyTorch computes the parts as they are."""
        parts = [part for part in self.quantized or [] if isinstance(part, QuantizedWeight)]
        on_gpu = bool(parts) and packs_on_gpu(parts[0].device, dtype)
        if not parts or not (on_gpu or (parts[0].device.type == "cpu" and host_supports(dtype))):
            return
        alone = self.is_mixed or len(parts) != len(self.quantized or ()) or len(parts) == 1
        if not alone and (whole := merged(parts)):
            self.quantized, parts = nn.ModuleList([whole]), [whole]
        for part in parts:
            part.pack(on_gpu)

    def finish(self, out: Tensor) -> Any:
        """What follows the product."""
        if not self.gated:
            return out
        return self.readers[0].gate(out) if self.readers else self.activation(out)

    def whole_bias(self) -> Tensor | None:
        """The bias that this shard adds to its features or to its partial sum; None without one."""
        if self.bias is None:
            return None
        if self.dim == 1:
            # with --deterministic in fp32, where no share of a 16-bit bias is rounded
            whole = self.bias.float() if determinism.enabled() else self.bias
            return self.bias if self.shard.count == 1 else whole / self.shard.count
        return F.pad(self.bias, self.padding) if any(self.padding) else self.bias

    @property
    def fused_gate(self) -> bool:
        """Whether the layer is gated, and the kernel of its product may compute the activation, too. Kernels know only SwiGLU."""
        return self.gated and self.activation is swiglu and self.adapters is None

    @property
    def is_mixed(self) -> bool:
        """Whether it has the layers of experts, of which a token has some (`layers/experts.py`)."""
        return self.parts[0].startswith("experts.")

    @property
    def is_quantized(self) -> bool:
        return self.quantized is not None

    def own_range(self, part: str) -> range:
        """Which of a part's features in the full model this shard has: output features, or input features of a row-parallel layer."""
        return self.shard.range(self.config, split_of(part).axis)

    @property
    def only_called(self) -> bool:
        return self.is_quantized or self.adapters is not None

    @property
    def multiplied(self) -> Tensor | Packed | None:
        if self.adapters is not None:
            return None
        return self.packed if self.quantized else self.weight

    def quantized_parts(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """The quantized parts and their names (`q_proj`, …)."""
        for part, module in zip(self.parts, self.quantized or [], strict=False):
            if isinstance(module, QuantizedWeight):
                yield part, module

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """The fused parts with their checkpoint names (`q_proj.weight`, `q_proj.bias`, …), as views of this layer's tensors,
        without the weights that are quantized."""
        sizes = self.rows
        if self.quantized:
            plain = [(part, m.weight) for part, m in zip(self.parts, self.quantized, strict=True) if isinstance(m, PlainWeight)]
        else:
            plain = list(zip(self.parts, self.weight.split(sizes), strict=True))
        for part, weight in plain:
            yield f"{part}.weight", weight
        if self.bias is not None:
            for part, bias in zip(self.biased, self.bias.split(self.lengths), strict=True):
                yield f"{part}.bias", bias

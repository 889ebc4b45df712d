"""Ladder and hybrid-ladder models for transformers: AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True).

Rung writes this file into the folder of a checkpoint with ladder layers. It needs transformers 4.56 or newer and no code of
Rung. The weights are those of one of `FAMILIES`; only the residual connections differ (Zhang et al.,
Ladder-residual, arXiv:2501.06589, section 3). h_1 … h_2L are the attention and MLP modules, each with its norm, and
x_0 = x_{-1} is the embedding:

    x_i = x_{i-1} + h_i(x_{i-1})     a module of a standard layer
    x_i = x_{i-1} + h_i(x_{i-2})     a module of a layer that config.ladder_layers lists

Gradient checkpointing is not supported, because a layer also needs the input of the module before it.
"""

from types import MethodType
from typing import Any, cast

import transformers
from torch import Tensor, nn

FAMILIES = (
    "Llama", "Mistral", "Ministral3", "Qwen2", "Qwen3", "Granite", "Phi3", "SmolLM3", "Olmo2", "Olmo3", "SeedOss", "Gemma3",
)  # fmt: skip


class Carry:
    """Passes x_{i-2} to the next module during one forward pass."""

    before: Tensor | None = None


def forward(layer: Any, hidden_states: Tensor, **context: Any) -> Tensor:
    """A decoder layer; hidden_states (batch, tokens, features) is x_{i-1}."""
    x = hidden_states
    before = x if layer.is_first else layer.carry.before
    scale = getattr(layer, "residual_multiplier", 1.0)  # of Granite
    # of OLMo and Gemma, norms are behind the modules
    same, behind = nn.Identity(), getattr(layer, "post_feedforward_layernorm", None)
    first, second = getattr(layer, "input_layernorm", same), layer.post_attention_layernorm
    norms = (
        (first, second, getattr(layer, "pre_feedforward_layernorm", same), behind) if behind else (first, same, second, same)
    )
    update = layer.self_attn(hidden_states=norms[0](before if layer.is_ladder else x), **context)[0]
    before, x = x, x + norms[1](update) * scale
    update = layer.mlp(norms[2](before if layer.is_ladder else x))
    layer.carry.before = None if layer.is_last else x
    return x + norms[3](update) * scale


class WithLadder(nn.Module):
    """Gives the layers of a transformers model the residual connections that its config names."""

    supports_gradient_checkpointing = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        carry, model = Carry(), cast(Any, self.model)
        for index, layer in enumerate(model.layers):
            layer.carry, layer.is_ladder = carry, index in config.ladder_layers
            layer.is_first, layer.is_last = index == 0, index == len(model.layers) - 1
            layer.forward = MethodType(forward, layer)


for family in FAMILIES:
    if hasattr(transformers, f"{family}ForCausalLM"):  # the installed version may not have all
        kind = {"model_type": "llamaLadder" if family == "Llama" else "rung"}
        base = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
        config = type(f"{family}LadderConfig", (base,), kind)
        bases = (WithLadder, getattr(transformers, f"{family}ForCausalLM"))
        model = type(f"{family}LadderForCausalLM", bases, {"config_class": config})
        globals().update({config.__name__: config, model.__name__: model})

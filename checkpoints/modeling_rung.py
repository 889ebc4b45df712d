"""Ladder and hybrid-ladder models for transformers: AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True).

Rung writes this file into the folder of a checkpoint with ladder layers. It needs transformers 4.56 or newer and no code of
Rung. The weights are those of a Llama, Mistral, Qwen2 or Qwen3; only the residual connections differ (Zhang et al.,
Ladder-residual, arXiv:2501.06589, section 3). h_1 … h_2L are the attention and MLP modules, each with its norm, and
x_0 = x_{-1} is the embedding:

    x_i = x_{i-1} + h_i(x_{i-1})     a module of a standard layer
    x_i = x_{i-1} + h_i(x_{i-2})     a module of a layer that config.ladder_layers lists

Gradient checkpointing is not supported, because a layer also needs the input of the module before it.
"""

from types import MethodType
from typing import Any, cast

from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


class Carry:
    """Passes x_{i-2} to the next module during one forward pass."""

    before: Tensor | None = None


def forward(layer: Any, hidden_states: Tensor, **context: Any) -> Tensor:
    """A decoder layer; hidden_states (batch, tokens, features) is x_{i-1}."""
    x = hidden_states
    before = x if layer.is_first else layer.carry.before
    update = layer.self_attn(hidden_states=layer.input_layernorm(before if layer.is_ladder else x), **context)[0]
    before, x = x, x + update
    update = layer.mlp(layer.post_attention_layernorm(before if layer.is_ladder else x))
    layer.carry.before = None if layer.is_last else x
    return x + update


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


class LlamaLadderConfig(LlamaConfig):
    model_type = "llamaLadder"


class MistralLadderConfig(MistralConfig):
    model_type = "rung"


class Qwen2LadderConfig(Qwen2Config):
    model_type = "rung"


class Qwen3LadderConfig(Qwen3Config):
    model_type = "rung"


class LlamaLadderForCausalLM(WithLadder, LlamaForCausalLM):
    config_class = LlamaLadderConfig


class MistralLadderForCausalLM(WithLadder, MistralForCausalLM):
    config_class = MistralLadderConfig


class Qwen2LadderForCausalLM(WithLadder, Qwen2ForCausalLM):
    config_class = Qwen2LadderConfig


class Qwen3LadderForCausalLM(WithLadder, Qwen3ForCausalLM):
    config_class = Qwen3LadderConfig

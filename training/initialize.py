"""Allocates and fills the parameters of a model that was built on the meta device: from a checkpoint, or at random."""

import math
from collections.abc import Callable

import torch
from torch import nn

from checkpoints.sources import Source
from checkpoints.weights import check_names, fill, module_places, places, randomize
from comms import Local
from config import ModelConfig
from errors import UserError
from layers.rope import rope_frequencies
from model import RMSNorm, Transformer


def empty_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The whole model with its parameters on the meta device.

    Raises UserError for a variant that is only a limit of speed, and for a desync model with copies of weights that training would
    let drift apart.
    """
    copied = config.qk_norm or config.o_bias or config.mlp_bias or config.experts
    if config.variant == "desync" and config.desync_streams > 1 and (config.desync_streams > config.n_kv_heads or copied):
        raise UserError(
            f"a desync model with {config.desync_streams} streams, {config.n_kv_heads} KV heads"
            f"{' and QK norm' if config.qk_norm else ''}{' and biases behind sums' if config.o_bias or config.mlp_bias else ''}"
            f"{' and routers' if config.experts else ''} "
            "keeps copies of weights that training would let drift apart; "
            "train with at most as many streams as KV heads, and without QK norm, attention_bias, mlp_bias and experts"
        )
    if config.quantization is not None:
        raise UserError(f"the checkpoint is quantized ({config.quantization.description}); train from one in 16 or 32 bits")
    if config.kind.speed_limit:
        raise UserError(f"{config.variant} is a speed limit and cannot be trained; choose another --variant")
    model = Transformer(config, Local(), torch.device("meta"), dtype)
    model.frequencies = rope_frequencies(config).to(device)
    return model


def materializer(model: Transformer, source: Source | None, seed: int) -> Callable[[str], nn.Parameter]:
    """A function that allocates the parameter of a name and fills it: from `source`, or at random without one.

    Random values: normal(0, 0.02), with the modules' output projections scaled by 1 / sqrt(2 * layers) as in GPT-2; norms
    1, biases 0. Raises UserError if `source` belongs to another model.
    """
    if source is not None:
        check_names(model.config, list(places(model)), source)
    device = model.frequencies.device
    depth_scale = 1 / math.sqrt(2 * model.config.n_layers)

    def materialize(name: str) -> nn.Parameter:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        hollow = getattr(module, attribute)
        start = 1.0 if isinstance(module, RMSNorm) and not module.centered else 0.0
        parameter = nn.Parameter(torch.full(hollow.shape, start, dtype=hollow.dtype, device=device))
        setattr(module, attribute, parameter)
        for place in module_places(module):
            if place.tensor.is_meta or place.tensor.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                continue  # this place belongs to the module's other parameter
            if source is not None:
                fill(place, source)
            else:
                randomize(place, seed)
        if source is None and path.endswith((".wo", ".w_down")):
            parameter.data.mul_(depth_scale)
        return parameter

    return materialize

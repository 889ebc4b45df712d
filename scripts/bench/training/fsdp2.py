"""The same training with torch's FSDP2 (`fully_shard`), with which `make bench-training` compares our executor.

Equal in both: model.py's Transformer and its initial values, the loss, the data, activation recomputation by layer, compiled
modules, weights and their all-gathers in `dtype`, gradients reduced in `dtype`, fp32 master weights with fused AdamW, and clipping
by the global norm. Different in FSDP2: a layer is gathered as a whole, gradients of micro-batches are accumulated in fp32, and the
master weights themselves are gathered instead of copies. Only functions that torch 2.11 and 2.13 both have are used.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from comm import Residual
from config import ModelConfig
from errors import UserError
from layers.attention import Causal
from layers.rope import rope_frequencies
from model import Transformer
from tp import World
from training.batches import Batch, GlobalBatches
from training.initialize import empty_model, materializer
from training.losses import cross_entropy
from training.optimizer import AdamSettings, Schedule

PREFETCH = (0, 1, 2)  # layers gathered ahead of the computing one; 0: FSDP2's own order


class End(nn.Module):
    """The last norm, and the head with the loss. One module, so that FSDP2 has gathered the head's weight when the loss needs
    it."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm = model.norm
        if not model.config.tie_embeddings:
            self.head = model.head
        self.model = (model,)  # in a tuple, so that it is not a submodule

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The summed loss (fp32 scalar) of hidden (B, T, C)."""
        return cross_entropy(self.model[0], self.norm(hidden), batch)


class Whole(nn.Module):
    """The model and its loss as one module. FSDP2 holds gathered weights only during the forward of the module that owns them."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embedding, self.layers, self.end = model.embedding, model.layers, End(model)
        self.model = (model,)

    def forward(self, batch: Batch) -> Tensor:
        tokens = batch.inputs
        hidden = self.model[0].hidden(tokens, Causal(tokens.shape[1], tokens.device))
        return self.end(hidden, batch)


def _finished(layer: Any, stream: Residual, frequencies: Tensor, context: Any, rows: None) -> Residual:
    """A block's result with its all-reduces completed. FSDP2's hooks would not see a tensor inside an all-reduce in flight."""
    stream = layer(stream, frequencies, context, rows)
    return Residual(stream.finish(), stream.comm)


def shard(
    config: ModelConfig, device: torch.device, mesh: DeviceMesh, dtype: torch.dtype, recompute: bool, compiled: bool, seed: int
) -> Whole:
    """A model on `mesh` with the initial values of `materializer`.

    A mesh (ranks,) shards over all ranks; (copies, ranks of a copy) is HSDP. Raises UserError for a variant whose blocks pass more
    than a tensor to the next block.
    """
    if config.variant not in ("standard", "parallel"):
        raise UserError(f"FSDP2 runs the standard and the parallel variant here, not {config.variant}")
    model = empty_model(config, device, torch.float32)
    for layer in model.layers:
        forward: Any = partial(_finished, layer.forward)
        layer.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False) if recompute else forward
    if compiled:
        model.compile_modules()
    whole = Whole(model)
    # casting inputs would round the rotary angles, which our executor keeps in fp32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)
    for module in model.layers:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    # not resharded after forward, because backward needs them first
    fully_shard(whole.end, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(whole, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    whole.to_empty(device=device)
    model.frequencies = rope_frequencies(config).to(device)
    _fill(model, seed)
    return whole


@torch.no_grad()
def _fill(model: Transformer, seed: int) -> None:
    """Set every rank's shards to the initial values of the whole model, one matrix at a time to limit memory."""
    materialize = materializer(empty_model(model.config, model.frequencies.device, torch.float32), None, seed)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        value = materialize(name).detach()
        parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))
        value.untyped_storage().resize_(0)


def prefetch(whole: Whole, depth: int) -> None:
    """Gather `depth` layers ahead in forward and backward. 0: FSDP2's own order."""
    units: list[Any] = [*whole.layers, whole.end]
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, i - depth) : i][::-1])


@dataclass
class Fsdp2Trainer:
    """The counterpart of training.step.Trainer.

    late: reduce gradients over ranks once per step instead of once per micro-batch. This keeps whole gradients in memory.
    """

    whole: Whole
    settings: AdamSettings
    schedule: Schedule
    batches: GlobalBatches
    world: World
    micro_batch: int  # windows
    late: bool = False
    step: int = 0
    parameters: list[nn.Parameter] = field(init=False)
    adam: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.whole.parameters())
        decayed = [p for p in self.parameters if p.dim() == 2]
        rest = [p for p in self.parameters if p.dim() != 2]
        groups = [dict(params=decayed, weight_decay=self.settings.weight_decay), dict(params=rest, weight_decay=0.0)]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=self.settings.betas, eps=self.settings.eps, fused=True)

    def train_step(self) -> tuple[Tensor, Tensor]:
        """Do one step. Returns this rank's share of the loss per token (the loss is the sum over ranks) and the gradient's norm."""
        world, root = self.world, self.whole
        assert isinstance(root, FSDPModule)
        accumulation = self.batches.size // (world.world_size * self.micro_batch)
        supervised = self.batches.supervised(self.step)
        share = torch.zeros((), device=world.device)
        for number in range(accumulation):
            last = number == accumulation - 1
            root.set_is_last_backward(last)
            root.set_requires_gradient_sync(last or not self.late)
            root.set_requires_all_reduce(last)  # after the previous line, which sets it too
            index = number * world.world_size + world.rank
            loss = root(self.batches.micro_batch(self.step, index, self.micro_batch).to(world.device)) / supervised
            (loss * world.world_size).backward()  # FSDP2 averages over the ranks
            share += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        for group in self.adam.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        self.adam.step()
        self.adam.zero_grad()
        self.step += 1
        return share, norm.full_tensor() if isinstance(norm, DTensor) else norm

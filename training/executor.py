"""Runs forward and backward under any sharding of the model states, and overlaps communication with computation.

The schedule (AMSP, arXiv:2311.00257, section V.C) is carried out by hooks:

    forward, a module's pre-hook       wait for its weights; begin to gather those of the next layer
    forward, a module's hook           free its weights (the last module keeps them for its backward)
    backward, a module's pre-hook      wait for its weights; begin to gather those of the previous module
    backward, a weight's gradient      begin to reduce-scatter it, before the input's gradient is computed
    backward, a module's hook          free its weights
    recomputation, a layer's pre-hook  begin to gather the previous layer; keep this layer's weights for its gradients

A module is a linear layer: PyTorch's backward hooks take tensors, and an `Attention` passes on a stream. A sparse MLP is one module
with three weights. The embedding and the head are gathered around them. Norms and biases, a ten-thousandth of the parameters, are
never cut: they are one more weight with P = 1x1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import determinism
from kernels.linear import linear
from layers.attention import Causal
from layers.experts import Router, SparseMLP
from layers.linear import ShardedLinear
from model import Transformer
from training.groups import Groups, make_groups
from training.reducer import Exposed, Reducer
from training.sharding import OVERLAPS, Mesh, Sharding
from training.weights import Weight, balance

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Execution:
    """How to run a step, apart from the sharding."""

    overlap: frozenset[str] = frozenset(OVERLAPS)  # which communication overlaps with computation
    intra_tensor: bool = False  # cut every tensor's optimizer states evenly, instead of giving each tensor one owner
    recompute: bool = False  # keep only each layer's input, and compute the layer again in backward
    compile: bool = False
    bucket_bytes: int = BUCKET_BYTES


@dataclass(eq=False)
class Unit:
    """A linear layer or a sparse MLP, and a weight that is gathered for it and freed after it."""

    module: nn.Module
    weight: Weight
    index: int  # in the order of forward
    layer: int
    parent: nn.Module  # the attention, MLP or block that it belongs to: in backward a parent's weights are gathered together


class Executor:
    """The whole model on this rank (`Local` communicator, every desync stream), with sharded states.

    `weights` lists all `Weight`s in the order in which forward needs them. The order is the same on every rank.
    `routed` has, of each layer of a sparse model in the newest forward pass, the router's logits (B * T, experts) fp32 and the experts that
    it chose (B * T, chosen).
    """

    def __init__(
        self,
        model: Transformer,
        materialize: Callable[[str], nn.Parameter],
        rank: int,
        sharding: Sharding,
        cluster: Mesh,
        execution: Execution,
    ) -> None:
        """Collective. model: its parameters may be on the meta device. materialize: allocates and fills the parameter of
        a name. It is called for one matrix at a time, so that at most one whole matrix exists in addition to the shards."""
        sharding.check(cluster)
        self.model, self.execution, self.overlap = model, execution, execution.overlap
        device = model.frequencies.device
        self.exposed = Exposed(device)
        self.reducer = Reducer(execution.bucket_bytes, "gradients" in self.overlap, self.exposed)
        whole = replace(sharding, parameters=Mesh(1, 1))
        groups = make_groups(rank, sharding, cluster)
        self.groups = groups
        self.whole_groups = groups if whole == sharding else make_groups(rank, whole, cluster)
        self._in_backward = False
        self.routed: list[tuple[Tensor, Tensor]] = []
        self._build_weights(materialize)
        self._build_units()
        self._add_hooks()

    # --- construction ----------------------------------------------------------------------------------------------------

    def _build_weights(self, materialize: Callable[[str], nn.Parameter]) -> None:
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        vectors = [name for name, shape in shapes.items() if len(shape) != 2]
        matrices = [name for name, shape in shapes.items() if len(shape) == 2]
        owners = balance([shapes[name].numel() for name in matrices], self.groups.parts)
        self.vectors = self._weight(vectors, [materialize(name) for name in vectors], self.whole_groups, 0)
        self._by_parameter: dict[nn.Parameter, Weight] = {}
        for name, owner in zip(matrices, owners, strict=True):
            parameter = materialize(name)
            self._by_parameter[parameter] = self._weight([name], [parameter], self.groups, owner)
        self.weights = [self.vectors, *self._by_parameter.values()]

    def _weight(self, names: list[str], parameters: list[nn.Parameter], groups: Groups, owner: int) -> Weight:
        cuts = groups.parts[0] * groups.parts[1] if self.execution.intra_tensor else 1
        return Weight(names, parameters, groups, cuts, owner)

    def _build_units(self) -> None:
        self.embedding = self._by_parameter[self.model.embedding.weight]
        self.head = self._by_parameter[self.model.head.weight]
        self.units: list[Unit] = []
        for number, layer in enumerate(self.model.layers):
            for module, parameter, parent in _matrices(layer):
                self.units.append(Unit(module, self._by_parameter[parameter], len(self.units), number, parent))

    def _add_hooks(self) -> None:
        hooks: list[Any] = []
        for unit in self.units:
            hooks.append(unit.module.register_forward_pre_hook(partial(self._before_forward, unit)))
            if self.groups.gather.size > 1:
                hooks.append(unit.module.register_forward_hook(partial(self._after_forward, unit)))
                hooks.append(unit.module.register_full_backward_pre_hook(partial(self._before_backward, unit)))
                hooks.append(unit.module.register_full_backward_hook(partial(self._after_backward, unit)))
        self._arrived: dict[nn.Parameter, Tensor] = {}
        for parameter in self.vectors.parameters:
            hooks.append(parameter.register_post_accumulate_grad_hook(self._vector_ready))
        if self.execution.compile:
            self.model.compile_modules()
        weight_first = not self.execution.compile and self.groups.gather.size > 1 and "parameters" in self.overlap
        linears = [unit.module for unit in self.units if isinstance(unit.module, ShardedLinear)] if weight_first else []
        for module in linears:
            ready = partial(self._send, self._by_parameter[module.weight])
            module.forward = partial(_weight_first_linear, module, ready)  # type: ignore[method-assign]
        early = {module.weight for module in linears}
        for parameter, weight in self._by_parameter.items():
            if parameter not in early:
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._matrix_ready, weight)))
        self._hooks = hooks
        for router in self.model.modules():
            if isinstance(router, Router):
                router.forward = partial(self._route, router)  # type: ignore[method-assign]
        if self.execution.recompute:
            for layer in self.model.layers:
                again: Any = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
                layer.forward = again

    def close(self) -> None:
        """Wait for communication in flight, which NCCL would keep in memory, and remove the hooks. A parameter stores its
        hooks where Python's garbage collector does not see them, so with its hooks the model would never be freed."""
        self.synchronize()
        for hook in self._hooks:
            hook.remove()

    # --- one micro-batch -------------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 ids to the last hidden states after the final norm, (B, T, C). The head's weight is gathered when
        it returns."""
        self._in_backward = False
        self.routed.clear()
        self._wait(self.vectors)
        self._have(self.embedding)
        hidden = self.model.hidden(tokens, Causal(tokens.shape[1], tokens.device))
        self._have(self.head)
        return self.model.norm(hidden)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Compute and reduce the gradients of `loss`, which must come from `forward`. last: this is the step's last
        micro-batch."""
        self._in_backward, self.reducer.last = True, last
        loss.backward()
        self._in_backward = False
        self.reducer.finish()

    def take_gradients(self) -> dict[Weight, Tensor]:
        """The step's gradients of the elements that this rank owns, summed over all ranks and micro-batches."""
        return self.reducer.take()

    def synchronize(self) -> None:
        """Wait until all new parameters have been received."""
        for weight in self.weights:
            self._wait(weight)

    # --- hooks -----------------------------------------------------------------------------------------------------------

    def _route(self, router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        """A router's forward."""
        logits = router.logits(x)
        experts, weights = router.choose(logits)
        if not self._in_backward:  # not again when a layer is recomputed
            self.routed.append((logits, experts))
        return experts, weights

    def _before_forward(self, unit: Unit, *_: object) -> None:
        first = unit.index == 0 or self.units[unit.index - 1].layer != unit.layer
        if unit.index == 0 and not self._in_backward and self.embedding is not self.head:
            self.embedding.release()
        if first and "parameters" in self.overlap:
            for weight in self._of_layer(unit.layer):
                weight.gather()
            for weight in self._of_layer(unit.layer - 1 if self._in_backward else unit.layer + 1):
                weight.gather()
        self._have(unit.weight)

    def _of_layer(self, layer: int) -> Iterator[Weight]:
        """A layer's weights. The index after the last layer stands for the head."""
        if layer == len(self.model.layers):
            yield self.head
        for unit in self.units:
            if unit.layer == layer:
                yield unit.weight

    def _after_forward(self, unit: Unit, *_: object) -> None:
        if not self._in_backward and unit.parent is not self.units[-1].parent:
            unit.weight.release()

    def _before_backward(self, unit: Unit, *_: object) -> None:
        self._have(unit.weight)
        if "parameters" in self.overlap and not self.execution.recompute:
            for before in self._previous_parent(unit):
                before.weight.gather()

    def _previous_parent(self, unit: Unit) -> Iterator[Unit]:
        """The linear layers of the parent that forward computes before this unit's."""
        others = [one for one in self.units[: unit.index] if one.parent is not unit.parent]
        return (one for one in others if one.parent is others[-1].parent)

    def _after_backward(self, unit: Unit, *_: object) -> None:
        unit.weight.release()

    def _matrix_ready(self, weight: Weight, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if weight is self.head or weight is self.embedding:
            weight.release()
        self._send(weight, gradient)

    def _vector_ready(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._arrived[parameter], parameter.grad = parameter.grad, None
        if len(self._arrived) == len(self.vectors.parameters):
            self._send(self.vectors, *(self._arrived[p] for p in self.vectors.parameters))
            self._arrived.clear()

    def _send(self, weight: Weight, *gradients: Tensor) -> None:
        flat = weight.flatten(gradients)
        shard, work = weight.scatter(flat)
        if "parameters" not in self.overlap:
            self.exposed.wait(work)
            work = None
        self.reducer.add(weight, flat, shard, work)

    # --- waiting ---------------------------------------------------------------------------------------------------------

    def _have(self, weight: Weight) -> None:
        weight.gather()
        self._wait(weight)

    def _wait(self, weight: Weight) -> None:
        if weight.gathering is not None or weight.updating:
            with self.exposed.waiting():
                weight.wait()


def _matrices(layer: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter, nn.Module]]:
    """In the order of forward: a module, a matrix that it multiplies with, and the module that it belongs to."""
    for child in layer.children():
        if isinstance(child, ShardedLinear):
            yield child, child.weight, layer
        elif isinstance(child, SparseMLP):
            yield from ((child, part.weight, layer) for part in (child.router, child.w_gate_up, child.w_down))
        else:
            yield from _matrices(child)


class _WeightFirst(torch.autograd.Function):
    """A linear layer whose backward first computes the weight's gradient and passes it to `ready`, and then computes the
    input's gradient, so that the weight gradient's reduce-scatter overlaps with that computation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ready: Callable[[Tensor], None], parts: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ready, ctx.biased = ready, bias is not None
        return linear(x, weight, bias, parts) if determinism.enabled() else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        ctx.ready(rows.t() @ x.flatten(0, -2))
        return gradient @ weight, None, rows.sum(0) if ctx.biased else None, None, None


def _weight_first_linear(layer: ShardedLinear, ready: Callable[[Tensor], None], x: Tensor) -> Tensor:
    return layer.finish(_WeightFirst.apply(x, layer.weight, layer.whole_bias(), ready, layer.sum_parts))

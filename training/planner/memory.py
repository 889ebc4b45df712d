"""The memory that a plan takes on each GPU (AMSP, section IV.D): model states, activations, buffers.

    P + G + OS = (2 / |P| + 2 / |G| + 12 / |OS|) Ψ bytes in mixed precision

The paper refers to other papers' formulas for activations. Here the tensors that autograd keeps for a layer of model.py are
counted, with an attention kernel that does not store the scores.
"""

from dataclasses import dataclass

from config import ModelConfig
from training.losses import chunk_of
from training.planner.workload import Parts, Workload, layer_matrices, tables
from training.sharding import Mesh, Sharding


@dataclass(frozen=True)
class Memory(Parts):
    """Bytes of one GPU, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # at their peak, including the logits
    buffers: float  # gathered weights, unsharded gradients, buckets
    reserve: float


def streams(config: ModelConfig, layer: int) -> tuple[int, int]:
    """How many different residual streams the attention and the MLP of a layer read: several with desync, where the module before
    has not reduced them."""
    pattern, count = config.desync_pattern, config.desync_streams
    if not config.kind.streams:
        return 1, 1
    return 1 if layer == 0 or pattern[layer - 1].mlp else count, 1 if pattern[layer].attention else count


def layer_activations(config: ModelConfig, tokens: int, element: int, layer: int) -> int:
    """Bytes that a layer keeps for its backward pass, with `element` bytes per number.

    Per token, for C features, H query heads and K key-value heads of dimension D, and an MLP of width F: the inputs and
    outputs of both norms (4 C; 2 C if attention and MLP share a norm; with S desync streams S outputs of each, and as many
    inputs as streams differ); rotated q and k, the fused projection that v is a view of, and the output of attention
    (3 H D + 3 K D); gate, up, silu(gate) and their product (4 F); and in fp32 the log-sum-exp of attention (H).

    In a sparse layer each expert of a token has the 4 F, its input and its output (2 C), and in fp32 the weighted output (C), besides 20
    bytes for its places and weight. The router keeps a softmax in fp32 and the order of all experts, and its input and a copy of its
    matrix in fp32; normalized weights are kept with their sum.
    """
    norms = 2 if config.kind.shared_input else 2 * config.desync_streams + sum(streams(config, layer))
    numbers = norms * config.hidden_size + 3 * (config.n_heads + config.n_kv_heads) * config.head_dim
    others = 4 * config.n_heads
    if config.experts is None:
        return tokens * (element * (numbers + 4 * config.intermediate_size) + others)
    count, chosen, hidden = config.experts.count, config.experts.chosen, config.hidden_size
    others += chosen * (element * (4 * config.intermediate_size + 2 * hidden) + 4 * hidden + 20) + 12 * count
    others += 4 * (chosen + 1) if config.experts.normalized else 0
    copies = hidden * ((4 - element) * tokens + 4 * count) if element < 4 else 0
    return tokens * (element * numbers + others) + copies


def loss_activations(config: ModelConfig, tokens: int, element: int) -> int:
    """Bytes at the loss (`training/losses.py`): the final norm's input and output, and the output's gradient; the head's
    gradient accumulated in fp32, rounded, and scaled; and for one chunk of positions the logits, and in fp32 their copy,
    log-softmax and gradient."""
    rows = 3 * element * tokens * config.hidden_size
    head = (4 + 2 * element) * config.vocab_size * config.hidden_size
    return rows + head + (element + 12) * min(tokens, chunk_of(config.vocab_size)) * config.vocab_size


def activations(workload: Workload) -> int:
    """Bytes at the peak. Without recomputation: all layers when backward begins, plus the loss. With recomputation: the
    inputs of all layers, plus the larger of one layer and the loss."""
    config, tokens, element = workload.config, workload.tokens, workload.bytes.activations
    layers = [layer_activations(config, tokens, element, layer) for layer in range(config.n_layers)]
    loss = loss_activations(config, tokens, element)
    if not workload.recompute:
        return sum(layers) + loss
    inputs = sum(streams(config, layer)[0] for layer in range(config.n_layers))
    return inputs * tokens * config.hidden_size * element + max(*layers, loss)


def buffers(workload: Workload, sharding: Sharding) -> int:
    """Bytes of communication buffers: two layers' gathered weights and two unsharded gradients if P is sharded, and two
    gradient buckets if there is an all-reduce."""
    layer, largest = layer_matrices(workload.config), max(layer_matrices(workload.config) + tables(workload.config))
    gathered = 0
    if sharding.parameters.size > 1:
        gathered = workload.bytes.parameters * (2 * max(sum(layer), largest)) + workload.bytes.gradients * 2 * largest
    summed = 2 * workload.bucket_bytes if sharding.parameters != workload.mesh else 0
    return gathered + summed


def memory(workload: Workload, sharding: Sharding, secondary: Mesh | None = None) -> Memory:
    """The memory of a GPU under `sharding`. secondary: the mesh of ZeRO++'s second copy of P, if there is one."""
    psi = workload.parameters
    held = workload.bytes.parameters * psi / sharding.parameters.size
    if secondary is not None:
        held += workload.bytes.parameters * psi / secondary.size
    return Memory(
        parameters=held,
        gradients=workload.bytes.gradients * psi / sharding.gradients.size,
        optimizer=workload.bytes.optimizer * psi / sharding.optimizer.size,
        activations=activations(workload),
        buffers=buffers(workload, sharding),
        reserve=workload.reserve_bytes,
    )

"""How much memory of a GPU a plan takes (AMSP, section IV.D): model states, activations, buffers.

    P + G + OS = (2 / |P| + 2 / |G| + 12 / |OS|) Ψ bytes in mixed precision

The paper leaves the activations to others' formulas. Here they are counted from what autograd keeps of model.py's layer, with
an attention kernel that keeps no scores.
"""

from dataclasses import asdict, dataclass

from config import ModelConfig
from training.job import Job, layer_matrices, tables
from training.losses import CHUNK
from training.sharding import Mesh, Sharding


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # at their peak, the logits' among them
    buffers: float  # gathered weights, whole gradients, buckets
    reserve: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def layer_activations(config: ModelConfig, tokens: int, element: int) -> int:
    """Bytes that a layer keeps for its backward pass, `element` bytes a number.

    A token: both norms' inputs and outputs (4 C; 2 C where attention and MLP share a norm); rotated q and k, the projection
    that v is a view of, and the attention's output (3 H D + 3 K D); gate, up, silu(gate) and their product (4 F); and in fp32
    the attention's log-sum-exp (H).
    """
    norms = 2 if config.variant == "parallel" else 4
    numbers = norms * config.hidden_size + 3 * (config.n_heads + config.n_kv_heads) * config.head_dim
    numbers += 4 * config.intermediate_size
    return tokens * (element * numbers + 4 * config.n_heads)


def loss_activations(config: ModelConfig, tokens: int, element: int) -> int:
    """Bytes at the loss (`training/losses.py`): the final norm's input, output and its gradient; the head's gradient, summed
    in fp32, rounded and scaled; of a chunk of positions the logits, and in fp32 their copy, log-softmax and gradient."""
    rows = 3 * element * tokens * config.hidden_size
    head = (4 + 2 * element) * config.vocab_size * config.hidden_size
    return rows + head + (element + 12) * min(tokens, CHUNK) * config.vocab_size


def activations(job: Job) -> int:
    """Bytes at the peak: all layers' when backward begins; recomputing, their inputs and what one layer or the loss takes."""
    layer = layer_activations(job.config, job.tokens, job.bytes.activations)
    loss = loss_activations(job.config, job.tokens, job.bytes.activations)
    if not job.recompute:
        return job.config.n_layers * layer + loss
    inputs = job.config.n_layers * job.tokens * job.config.hidden_size * job.bytes.activations
    return inputs + max(layer, loss)


def buffers(job: Job, sharding: Sharding) -> int:
    """Bytes of what is in flight: two layers' gathered weights and two whole gradients where P is sharded, two buckets of
    gradients where there is an all-reduce."""
    layer, largest = layer_matrices(job.config), max(layer_matrices(job.config) + tables(job.config))
    gathered = 0
    if sharding.parameters.size > 1:
        gathered = job.bytes.parameters * (2 * max(sum(layer), largest)) + job.bytes.gradients * 2 * largest
    summed = 2 * job.bucket_bytes if sharding.parameters != job.mesh else 0
    return gathered + summed


def memory(job: Job, sharding: Sharding, secondary: Mesh | None = None) -> Memory:
    """What a GPU holds under `sharding`. `secondary` is the mesh of ZeRO++'s second copy of P, if there is one."""
    psi = job.parameters
    held = job.bytes.parameters * psi / sharding.parameters.size
    if secondary is not None:
        held += job.bytes.parameters * psi / secondary.size
    return Memory(
        parameters=held,
        gradients=job.bytes.gradients * psi / sharding.gradients.size,
        optimizer=job.bytes.optimizer * psi / sharding.optimizer.size,
        activations=activations(job),
        buffers=buffers(job, sharding),
        reserve=job.reserve_bytes,
    )

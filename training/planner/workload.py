"""The input of the planner: a model, the GPUs it is trained on, the batch, and how the executor runs."""

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import NamedTuple

from comms.cluster import Cluster
from config import ModelConfig
from errors import UserError
from training.planner.collectives import Profile
from training.sharding import OVERLAPS, Mesh


@dataclass(frozen=True)
class Parts:
    """Numbers that add up."""

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


class Precision(NamedTuple):
    """Bytes per parameter of each model state (AMSP, section II.C), and bytes per element of the activations."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int


PRECISIONS = {
    "bfloat16": Precision(2, 2, 12, 2),  # the optimizer keeps an fp32 master copy and Adam's two moments
    "float32": Precision(4, 4, 8, 4),  # the parameters are their own master copy
}


@dataclass(frozen=True)
class Workload:
    """Everything that `predict` and `choose` need besides the sharding."""

    config: ModelConfig
    mesh: Mesh  # all GPUs
    cluster: Cluster
    profile: Profile = field(compare=False)
    sequence_length: int = 4096  # tokens
    micro_batch: int = 1  # sequences that a GPU computes at once
    global_batch: int = 2**22  # tokens per step, over all GPUs
    recompute: bool = False  # keep only the layers' inputs, and compute the layers again in backward
    precision: str = "bfloat16"
    intra_tensor: bool = False  # send updates by all-gather of evenly cut tensors, not by broadcasts of whole ones
    bucket_bytes: int = 64 * 2**20  # of gradients in one all-reduce
    overlap: frozenset[str] = frozenset(OVERLAPS)
    reserve_bytes: float = 2e9  # CUDA context, NCCL's channels, fragmentation: not in any formula

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches that a GPU computes per step. Raises UserError if the global batch cannot be divided evenly."""
        tokens = self.mesh.size * self.micro_batch * self.sequence_length
        count = self.global_batch // tokens
        if count < 1 or self.global_batch % tokens:
            nearest = tokens * max(1, round(self.global_batch / tokens))
            raise UserError(
                f"--global-batch of {self.global_batch} tokens cannot be shared by {self.mesh.size} GPUs with micro-batches of "
                f"{self.micro_batch} x {self.sequence_length} tokens; give a multiple of {tokens}, such as {nearest}"
            )
        return count

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def bytes(self) -> Precision:
        return PRECISIONS[self.precision]

    @cached_property
    def parameters(self) -> int:
        """Ψ: the number of entries of the model's matrices, whose states are sharded."""
        return self.config.parameter_count()


def layer_matrices(config: ModelConfig, active: bool = False) -> list[int]:
    """Entries of each weight matrix of a layer. Matrices with the same input count as one, as in model.py, where they are
    fused; so do all experts. active: of the experts, only as many as a token has."""
    hidden, heads = config.hidden_size, config.n_heads * config.head_dim
    qkv = hidden * (heads + 2 * config.n_kv_heads * config.head_dim)
    gate_up, out, down = 2 * hidden * config.intermediate_size, heads * hidden, config.intermediate_size * hidden
    if config.experts:
        count = config.experts.chosen if active else config.experts.count
        return [qkv, out, config.experts.count * hidden, count * gate_up, count * down]
    if config.kind.shared_input:
        return [qkv + gate_up, out, down]
    return [qkv, out, gate_up, down]


def tables(config: ModelConfig) -> list[int]:
    """Entries of the embedding and, unless the two are tied, of the head."""
    return [config.vocab_size * config.hidden_size] * (1 if config.tie_embeddings else 2)


def buckets(size: float, bucket_bytes: int) -> int:
    """The number of buckets, and so of all-reduces, for `size` bytes of gradients."""
    return max(1, math.ceil(size / bucket_bytes))

"""How long a training step takes under a sharding (AMSP, section IV.C), and its model FLOPs utilization.

Ψ is the number of parameters. P, G and OS are the meshes of the states, |P| is the size of a mesh, and OS / P is the mesh of
those ranks of an OS mesh that hold the same part of P. b_P and b_G are the bytes per parameter of P and G. M is the number of
micro-batches per step. AG, RS, AR and BC (bytes, mesh) are the profile's times of an all-gather, reduce-scatter, all-reduce and
broadcast.

    T_P  = M Σ over matrices  2 AG(b_P numel, P) + RS(b_G numel, P)                     (IV.C.1)
    T_OS = AR(b_G Ψ / |P|, all / P), in buckets, after the last micro-batch             (IV.C.2)
         + |OS / P| BC(b_P Ψ / |OS|, OS / P): each owner sends what it updated
    T_G  = (M - 1) AR(b_G Ψ / |P|, G / P), in buckets; 0 if G = P                       (IV.C.3)

With evenly cut tensors, Σ over matrices AG(b_P numel / |P|, OS / P) replaces the broadcasts of T_OS, and if OS is sharded over
all GPUs, an RS replaces its AR.

The paper's planner minimizes T_P + T_OS + T_G (IV.C.4). The step time predicted here also takes into account that part of the
communication is hidden behind computation.
"""

from dataclasses import dataclass

from config import ModelConfig
from training.planner.memory import Memory, memory
from training.planner.workload import Parts, Workload, buckets, layer_matrices, tables
from training.sharding import Mesh, Sharding


@dataclass(frozen=True)
class Communication(Parts):
    """Seconds of communication per step, by cause."""

    gather_forward: float  # T_P: all-gathers for forward
    gather_backward: float  # T_P: all-gathers for backward
    scatter: float  # T_P: reduce-scatters
    gradients: float  # T_G: all-reduces between micro-batches
    all_reduce: float  # T_OS: the all-reduce after the last micro-batch
    updates: float  # T_OS: new parameters, from their owners


@dataclass(frozen=True)
class ExposedSeconds(Parts):
    """Seconds per step in which the GPU waits for communication, by what it waits for."""

    parameters: float
    gradients: float
    updates: float


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a plan. Times are seconds per step, memory is bytes per GPU."""

    sharding: Sharding
    secondary: Mesh | None
    memory: Memory
    compute_seconds: float
    optimizer_seconds: float  # Adam reads and writes its states
    communication: Communication
    exposed: ExposedSeconds
    step_seconds: float
    mfu: float  # model FLOPs utilization, 0 to 1
    tokens_per_gpu_second: float


# --- computing -----------------------------------------------------------------------------------------------------------


def forward_flops(config: ModelConfig, sequence_length: int, sequences: int) -> float:
    """FLOPs of a forward pass: layers and head, with attention over the full square as Megatron-LM counts it.

    The model FLOPs of a step are three times these, also with recomputation, which is no useful work. For an MLP of 8 h² weights that is 72 B s l h² (1 + s / 6h + V /
    12lh), the formula of Narayanan et al. (arXiv:2104.04473, without recomputation). Here the model's actual matrices are
    counted, and of a sparse model's experts those that a token has. AMSP's footnote 2 also counts the full square.
    """
    tokens = sequence_length * sequences
    matrices = config.n_layers * sum(layer_matrices(config, active=True)) + config.vocab_size * config.hidden_size
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * sequence_length
    return tokens * (2.0 * matrices + attention)


def compute_seconds(workload: Workload) -> tuple[float, float]:
    """Seconds of forward and of backward of one micro-batch. Backward takes twice as long as forward, or three times as
    long with recomputation."""
    speed = workload.cluster.peak_flops(workload.precision) * workload.cluster.compute_efficiency
    forward = forward_flops(workload.config, workload.sequence_length, workload.micro_batch) / speed
    return forward, forward * (3 if workload.recompute else 2)


def optimizer_seconds(workload: Workload, sharding: Sharding) -> float:
    """Seconds of Adam, which is memory-bound: it reads and writes its states, reads gradients and writes parameters."""
    moved = 2 * workload.bytes.optimizer + workload.bytes.gradients + workload.bytes.parameters
    return workload.parameters / sharding.optimizer.size * moved / (workload.cluster.memory_gb_per_second * 1e9)


# --- communicating -------------------------------------------------------------------------------------------------------


def over(outer: Mesh, inner: Mesh) -> Mesh:
    """The mesh of those ranks of `outer` that hold the same part of a state sharded over `inner`."""
    return Mesh(outer.gpus // inner.gpus, outer.nodes // inner.nodes)


def sum_seconds(workload: Workload, size: float, mesh: Mesh, operation: str = "all-reduce") -> float:
    """Seconds to reduce `size` bytes of gradients over `mesh` with `operation`, in equal buckets."""
    count = buckets(size, workload.bucket_bytes)
    return count * workload.profile.seconds(operation, size / count, mesh)


def weights_seconds(workload: Workload, operation: str, element: float, mesh: Mesh) -> float:
    """Seconds of one `operation` on each matrix of the model, with `element` bytes per entry."""
    layer = sum(workload.profile.seconds(operation, element * numel, mesh) for numel in layer_matrices(workload.config))
    ends = sum(workload.profile.seconds(operation, element * numel, mesh) for numel in tables(workload.config))
    return workload.config.n_layers * layer + ends


def communication(workload: Workload, sharding: Sharding, secondary: Mesh | None = None) -> Communication:
    """Seconds of the collectives of one step. secondary: the mesh from which backward gathers P, as in ZeRO++."""
    p, g, os = sharding.parameters, sharding.gradients, sharding.optimizer
    micro_batches, psi = workload.micro_batches, workload.parameters
    forward = weights_seconds(workload, "all-gather", workload.bytes.parameters, p)
    backward = forward if secondary is None else weights_seconds(workload, "all-gather", workload.bytes.parameters, secondary)
    shard = workload.bytes.gradients * psi / p.size
    owners = over(os, p)
    updated = workload.bytes.parameters * psi / os.size
    last_sum = "reduce-scatter" if workload.intra_tensor and os == workload.mesh else "all-reduce"
    if workload.intra_tensor:
        updates = weights_seconds(workload, "all-gather", workload.bytes.parameters / p.size, owners)
    else:
        updates = owners.size * workload.profile.seconds("broadcast", updated, owners)
    return Communication(
        gather_forward=micro_batches * forward,
        gather_backward=micro_batches * backward,
        scatter=micro_batches * weights_seconds(workload, "reduce-scatter", workload.bytes.gradients, p),
        gradients=(micro_batches - 1) * sum_seconds(workload, shard, over(g, p)),
        all_reduce=sum_seconds(workload, shard, over(workload.mesh, p), last_sum),
        updates=updates,
    )


# --- overlapping ---------------------------------------------------------------------------------------------------------


def exposed(workload: Workload, sharding: Sharding, spent: Communication) -> ExposedSeconds:
    """The communication that computation does not hide (section V.C).

    Only the share `overlap_share` of the computing time hides communication, because collectives and kernels compete for
    SMs and memory bandwidth. That share of forward hides all-gathers. That share of backward hides all-gathers and
    reduce-scatters first, then all-reduces. The last bucket of an all-reduce is always exposed, because no computation
    follows it. Updates are hidden by what the all-gathers leave of the next step's first forward.
    """
    count = workload.micro_batches
    forward, backward = (workload.cluster.overlap_share * seconds for seconds in compute_seconds(workload))
    in_forward, in_backward = spent.gather_forward / count, (spent.gather_backward + spent.scatter) / count
    hidden_forward, hidden_backward = min(in_forward, forward), min(in_backward, backward)
    if "parameters" not in workload.overlap:
        hidden_forward = hidden_backward = 0.0
    shard = workload.bytes.gradients * workload.parameters / sharding.parameters.size
    last_bucket = 1 / buckets(shard, workload.bucket_bytes)  # its share of an all-reduce

    def waits(all_reduce: float) -> float:
        """Exposed seconds of one micro-batch's all-reduce, which takes `all_reduce` seconds."""
        if "gradients" not in workload.overlap:
            return all_reduce
        return max(all_reduce - (backward - hidden_backward), last_bucket * all_reduce)

    between = spent.gradients / (count - 1) if count > 1 else 0.0
    left = forward - hidden_forward if "updates" in workload.overlap else 0.0
    return ExposedSeconds(
        parameters=count * (in_forward - hidden_forward + in_backward - hidden_backward),
        gradients=(count - 1) * waits(between) + waits(spent.all_reduce),
        updates=max(0.0, spent.updates - left),
    )


def predict(workload: Workload, sharding: Sharding, secondary: Mesh | None = None) -> Prediction:
    """Time, memory and utilization of one step. Raises UserError if the meshes do not nest or the batch cannot be divided
    evenly."""
    sharding.check(workload.mesh)
    spent = communication(workload, sharding, secondary)
    waited = exposed(workload, sharding, spent)
    computing = workload.micro_batches * sum(compute_seconds(workload))
    updating = optimizer_seconds(workload, sharding)
    step = computing + updating + waited.total
    useful = 3 * forward_flops(workload.config, workload.sequence_length, workload.micro_batches * workload.micro_batch)
    return Prediction(
        sharding=sharding,
        secondary=secondary,
        memory=memory(workload, sharding, secondary),
        compute_seconds=computing,
        optimizer_seconds=updating,
        communication=spent,
        exposed=waited,
        step_seconds=step,
        mfu=useful / step / workload.cluster.peak_flops(workload.precision),
        tokens_per_gpu_second=workload.micro_batches * workload.tokens / step,
    )

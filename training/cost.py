"""How long a training step takes under a sharding (AMSP, section IV.C), and how much of the GPUs' peak that is.

Ψ parameters; P, G, OS their meshes, |P| a mesh's size, OS / P the mesh of the ranks of an OS mesh that hold the same part of P;
b bytes; M micro-batches a step. Times of collectives are those of the profile: AG, RS, AR, BC (operation, bytes, mesh).

    T_P  = M Σ over matrices  2 AG(b_P numel, P) + RS(b_G numel, P)                     (IV.C.1)
    T_OS = AR(b_G Ψ / |P|, all / P), in buckets, after the last micro-batch             (IV.C.2)
         + |OS / P| BC(b_P Ψ / |OS|, OS / P), each owner sends what it updated
           of evenly cut tensors: Σ over matrices AG(b_P numel / |P|, OS / P); and where OS is all, RS in place of AR
    T_G  = (M - 1) AR(b_G Ψ / |P|, G / P), in buckets, unless G = P                     (IV.C.3)

The planner minimizes their sum (IV.C.4). The step time goes further: some of the communication hides behind computation.
"""

from dataclasses import asdict, dataclass

from config import ModelConfig
from training.job import Job, buckets, layer_matrices, tables
from training.memory import Memory, memory
from training.sharding import Mesh, Sharding


@dataclass(frozen=True)
class Communication:
    """Seconds a step, by what causes them."""

    gather_forward: float  # T_P's all-gathers before forward
    gather_backward: float  # and before backward
    scatter: float  # T_P's reduce-scatters
    gradients: float  # T_G: all-reduces between micro-batches
    all_reduce: float  # T_OS: the sum after the last micro-batch
    updates: float  # T_OS: new parameters, from their owners

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Exposed:
    """Seconds a step in which the GPU waits, by what it waits for."""

    parameters: float
    gradients: float
    updates: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Prediction:
    """What a plan costs. Times are seconds a step, memory is bytes of a GPU."""

    sharding: Sharding
    secondary: Mesh | None
    memory: Memory
    compute_seconds: float
    optimizer_seconds: float  # Adam reads and writes its states
    communication: Communication
    exposed: Exposed
    step_seconds: float
    mfu: float  # model FLOPs utilization, 0 to 1
    tokens_per_gpu_second: float


# --- computing -----------------------------------------------------------------------------------------------------------


def forward_flops(config: ModelConfig, sequence_length: int, sequences: int) -> float:
    """FLOPs of a forward pass, layers and head, attention over the full square as Megatron-LM counts it.

    Three times this is the model FLOPs of a step: 72 B s l h² (1 + s / 6h + V / 12lh) of Narayanan et al. (arXiv:2104.04473,
    without recomputation) for its MLP of 8 h² weights; here the real matrices are counted. AMSP's footnote 2 keeps the whole
    square, too.
    """
    tokens = sequence_length * sequences
    matrices = config.n_layers * sum(layer_matrices(config)) + config.vocab_size * config.hidden_size
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * sequence_length
    return tokens * (2.0 * matrices + attention)


def model_flops(job: Job) -> float:
    """FLOPs that a micro-batch's forward and backward pass need. Recomputation does not count: it is no use."""
    return 3 * forward_flops(job.config, job.sequence_length, job.micro_batch)


def compute_seconds(job: Job) -> tuple[float, float]:
    """Seconds of forward and of backward of one micro-batch. Backward computes twice as much, and forward again if it
    recomputes."""
    speed = job.cluster.peak_flops(job.precision) * job.cluster.compute_efficiency
    forward = forward_flops(job.config, job.sequence_length, job.micro_batch) / speed
    return forward, forward * (3 if job.recompute else 2)


def optimizer_seconds(job: Job, sharding: Sharding) -> float:
    """Adam is bound by memory: it reads and writes its states, reads gradients and writes parameters."""
    moved = 2 * job.bytes.optimizer + job.bytes.gradients + job.bytes.parameters
    return job.parameters / sharding.optimizer.size * moved / (job.cluster.memory_gb_per_second * 1e9)


# --- communicating -------------------------------------------------------------------------------------------------------


def over(outer: Mesh, inner: Mesh) -> Mesh:
    """The mesh of the ranks of `outer` that hold the same part of what is cut over `inner`."""
    return Mesh(outer.gpus // inner.gpus, outer.nodes // inner.nodes)


def sum_seconds(job: Job, size: float, mesh: Mesh, operation: str = "all-reduce") -> float:
    """`size` bytes of gradients over `mesh`, in equal buckets."""
    count = buckets(size, job.bucket_bytes)
    return count * job.profile.seconds(operation, size / count, mesh)


def weights_seconds(job: Job, operation: str, element: float, mesh: Mesh) -> float:
    """One `operation` on each matrix of the model, `element` bytes for each of its entries."""
    layer = sum(job.profile.seconds(operation, element * numel, mesh) for numel in layer_matrices(job.config))
    ends = sum(job.profile.seconds(operation, element * numel, mesh) for numel in tables(job.config))
    return job.config.n_layers * layer + ends


def communication(job: Job, sharding: Sharding, secondary: Mesh | None = None) -> Communication:
    """The collectives of one step. With `secondary`, backward gathers from that mesh, as ZeRO++ does."""
    p, g, os = sharding.parameters, sharding.gradients, sharding.optimizer
    micro_batches, psi = job.micro_batches, job.parameters
    forward = weights_seconds(job, "all-gather", job.bytes.parameters, p)
    backward = forward if secondary is None else weights_seconds(job, "all-gather", job.bytes.parameters, secondary)
    shard = job.bytes.gradients * psi / p.size
    owners = over(os, p)
    updated = job.bytes.parameters * psi / os.size
    last_sum = "reduce-scatter" if job.intra_tensor and os == job.mesh else "all-reduce"
    if job.intra_tensor:
        updates = weights_seconds(job, "all-gather", job.bytes.parameters / p.size, owners)
    else:
        updates = owners.size * job.profile.seconds("broadcast", updated, owners)
    return Communication(
        gather_forward=micro_batches * forward,
        gather_backward=micro_batches * backward,
        scatter=micro_batches * weights_seconds(job, "reduce-scatter", job.bytes.gradients, p),
        gradients=(micro_batches - 1) * sum_seconds(job, shard, over(g, p)),
        all_reduce=sum_seconds(job, shard, over(job.mesh, p), last_sum),
        updates=updates,
    )


# --- both at once --------------------------------------------------------------------------------------------------------


def exposed(job: Job, sharding: Sharding, spent: Communication) -> Exposed:
    """What of the communication computation does not hide (section V.C).

    Only a share of the computing time hides anything, because collectives and kernels compete for SMs and memory. Gathers hide
    behind that share of forward; gathers, reduce-scatters and all-reduces, in this order, behind that of backward, but the last
    bucket of an all-reduce has nothing left to hide behind. Updates take what the gathers leave of the next step's first forward.
    """
    count = job.micro_batches
    forward, backward = (job.cluster.overlap_share * seconds for seconds in compute_seconds(job))
    in_forward, in_backward = spent.gather_forward / count, (spent.gather_backward + spent.scatter) / count
    hidden_forward, hidden_backward = min(in_forward, forward), min(in_backward, backward)
    if "parameters" not in job.overlap:
        hidden_forward = hidden_backward = 0.0
    shard = job.bytes.gradients * job.parameters / sharding.parameters.size
    last_bucket = 1 / buckets(shard, job.bucket_bytes)  # of an all-reduce, the fraction

    def waits(all_reduce: float) -> float:
        """Seconds of an all-reduce of one micro-batch that stay exposed."""
        if "gradients" not in job.overlap:
            return all_reduce
        return max(all_reduce - (backward - hidden_backward), last_bucket * all_reduce)

    between = spent.gradients / (count - 1) if count > 1 else 0.0
    left = forward - hidden_forward if "updates" in job.overlap else 0.0
    return Exposed(
        parameters=count * (in_forward - hidden_forward + in_backward - hidden_backward),
        gradients=(count - 1) * waits(between) + waits(spent.all_reduce),
        updates=max(0.0, spent.updates - left),
    )


def predict(job: Job, sharding: Sharding, secondary: Mesh | None = None) -> Prediction:
    """Time, memory and utilization of one step. Raises UserError if the meshes do not nest or the batch cannot be shared."""
    sharding.check(job.mesh)
    spent = communication(job, sharding, secondary)
    waited = exposed(job, sharding, spent)
    computing = job.micro_batches * sum(compute_seconds(job))
    updating = optimizer_seconds(job, sharding)
    step = computing + updating + waited.total
    return Prediction(
        sharding=sharding,
        secondary=secondary,
        memory=memory(job, sharding, secondary),
        compute_seconds=computing,
        optimizer_seconds=updating,
        communication=spent,
        exposed=waited,
        step_seconds=step,
        mfu=job.micro_batches * model_flops(job) / step / job.cluster.peak_flops(job.precision),
        tokens_per_gpu_second=job.micro_batches * job.tokens / step,
    )

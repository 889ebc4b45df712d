"""Fit the unknown figures of AMSP's cluster to the throughputs of its table V (Chen et al., arXiv:2311.00257)."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from checkpoints.presets import preset
from comm.cluster import Cluster
from config import ModelConfig
from training.planner.collectives import Profile, link_seconds
from training.planner.cost import forward_flops, predict
from training.planner.workload import OVERLAPS, Workload
from training.sharding import Mesh, Sharding

TABLE_IV = {"llama-7b": "1,1,8x1", "llama-13b": "4x1,4x1,8x1", "llama-30b": "8x1,8x1,8x4"}
# Table V: tokens per GPU and second on 64 GPUs with 1, 2, 4 and 8 micro-batches, and the MFU that it states for 8. The four rows
# of a model: everything overlapped; all but the updates; all but the updates and all-reduces; nothing.
MICRO_BATCHES = (1, 2, 4, 8)
OVERLAP_ROWS = [frozenset(OVERLAPS), frozenset(OVERLAPS[:2]), frozenset(OVERLAPS[:1]), frozenset[str]()]
TABLE_V = {
    "llama-7b": [(3525, 4119, 4416, 4503), (3346, 3991, 4329, 4438), (2812, 3609, 4070, 4286), (2812, 3609, 4070, 4286)],
    "llama-13b": [(1918, 2082, 2183, 2230), (1895, 1920, 2160, 2184), (1630, 1782, 2033, 2126), (1527, 1552, 1608, 1666)],
    "llama-30b": [(825, 856, 872, 880), (759, 814, 847, 859), (651, 740, 814, 842), (557, 654, 678, 719)],
}
TABLE_V_MFU = {"llama-7b": 0.67, "llama-13b": 0.62, "llama-30b": 0.51}
# The throughput and MFU of table V's 30B imply 1.81e11 FLOPs a token. Llama 1's 30B has 2.14e11; this shape has 1.82e11.
NARROW_30B = replace(preset("llama-30b"), hidden_size=6144, n_heads=48, n_kv_heads=48, intermediate_size=16384)
FITTED = ("compute_efficiency", "link_efficiency", "node_efficiency", "overlap_share")


class Links(Profile):
    """A profile that computes times from a cluster's figures instead of a table. The fit tries many clusters."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(f"links of {cluster.name}", cluster.gpus_per_node, [])
        self.cluster = cluster

    def seconds(self, operation: str, size: float, mesh: Mesh) -> float:
        return 0.0 if mesh.size == 1 else link_seconds(self.cluster, operation, size, mesh)


def table_v(cluster: Cluster, models: Mapping[str, ModelConfig]) -> Iterator[tuple[float, int]]:
    """Predicted and stated throughput (tokens per GPU and second) of each cell of table V."""
    profile, mesh = Links(cluster), Mesh(8, 8)
    for name, config in models.items():
        whole = Workload(config, mesh, cluster, profile, recompute=name == "llama-30b")
        for overlap, stated in zip(OVERLAP_ROWS, TABLE_V[name], strict=True):
            for count, tokens in zip(MICRO_BATCHES, stated, strict=True):
                workload = replace(whole, overlap=overlap, global_batch=mesh.size * whole.tokens * count)
                yield predict(workload, Sharding.parse(TABLE_IV[name])).tokens_per_gpu_second, tokens


def misfit(cluster: Cluster, models: Mapping[str, ModelConfig]) -> float:
    """Root mean square of the relative errors of the predictions for table V."""
    errors = [(got / stated - 1) ** 2 for got, stated in table_v(cluster, models)]
    return (sum(errors) / len(errors)) ** 0.5


def fit(cluster: Cluster, models: Mapping[str, ModelConfig]) -> tuple[Cluster, float]:
    """Fit the FITTED figures to table V by coordinate descent. Returns the cluster and its `misfit`.

    All figures start at 0.5. The best change of a single figure is made as long as it helps; then the step is halved.
    """
    middle: dict[str, Any] = dict.fromkeys(FITTED, 0.5)
    cluster = replace(cluster, **middle)
    best, step = misfit(cluster, models), 0.1
    while step > 0.002:
        moves = [
            replace(cluster, **{name: min(1.0, max(0.01, getattr(cluster, name) + sign * step))})
            for name, sign in itertools.product(FITTED, (-1, 1))
        ]
        error, nearest = min(((misfit(move, models), move) for move in moves), key=lambda pair: pair[0])
        if error < best - 1e-7:
            best, cluster = error, nearest
        else:
            step /= 2
    return cluster, best


def report_fit(cluster: Cluster) -> dict[str, Any]:
    """Fits to table V for different sets of models and shapes of the 30B."""
    small = {name: preset(name) for name in ("llama-7b", "llama-13b")}
    cases = {
        "7B, 13B and a 30B of 6144 features": small | {"llama-30b": NARROW_30B},
        "7B, 13B and Llama 1's 30B of 6656 features": small | {"llama-30b": preset("llama-30b")},
        "7B and 13B": small,
        "7B": {"llama-7b": preset("llama-7b")},
    }
    found = {}
    for name, models in tqdm(cases.items(), unit="fit", disable=None):
        fitted, error = fit(cluster, models)
        found[name] = {figure: round(getattr(fitted, figure), 3) for figure in FITTED} | {"rms_error": round(error, 4)}
    return found


def flops_of_table_v(cluster: Cluster) -> dict[str, Any]:
    """FLOPs per token that the throughput and MFU of table V imply, and those of the models' shapes."""
    rows = {}
    for name, mfu in TABLE_V_MFU.items():
        shapes = {"Llama 1": preset(name)} | ({"6144 features": NARROW_30B} if name == "llama-30b" else {})
        rows[name] = {"table V": mfu * cluster.peak_flops("bfloat16") / TABLE_V[name][0][-1]}
        rows[name] |= {shape: 3 * forward_flops(config, 4096, 1) / 4096 for shape, config in shapes.items()}
    return rows

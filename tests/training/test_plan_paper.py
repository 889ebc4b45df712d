"""The plans for AMSP's 1,024 A800s are those of docs/results/plan-paper.json, which the paper's were compared with."""

import json
from dataclasses import replace
from typing import Any

import pytest

from checkpoints.presets import preset
from comms.cluster import load_cluster
from tests import ROOT
from training.planner.collectives import synthesize
from training.planner.cost import predict
from training.planner.report import as_json
from training.planner.search import choose, filtered_meshes, shardings, tiling_meshes
from training.planner.workload import Workload
from training.sharding import OVERLAPS, Mesh, Sharding

STORED = json.loads((ROOT / "docs" / "results" / "plan-paper.json").read_text())
A800 = load_cluster("a800")
TABLE_IV = {"llama-7b": "1,1,8x1", "llama-13b": "4x1,4x1,8x1", "llama-30b": "8x1,8x1,8x4"}
MEMORY = 80e9
# Table V: tokens a GPU and second on 64 GPUs with 1, 2, 4 and 8 micro-batches. The four rows of a model: everything overlapped; all
# but the updates; all but the updates and all-reduces; nothing.
MICRO_BATCHES = (1, 2, 4, 8)
OVERLAP_ROWS = (OVERLAPS, OVERLAPS[:2], OVERLAPS[:1], ())
TABLE_V = {
    "llama-7b": [(3525, 4119, 4416, 4503), (3346, 3991, 4329, 4438), (2812, 3609, 4070, 4286), (2812, 3609, 4070, 4286)],
    "llama-13b": [(1918, 2082, 2183, 2230), (1895, 1920, 2160, 2184), (1630, 1782, 2033, 2126), (1527, 1552, 1608, 1666)],
    "llama-30b": [(825, 856, 872, 880), (759, 814, 847, 859), (651, 740, 814, 842), (557, 654, 678, 719)],
}
# The throughput and MFU of table V's 30B imply the FLOPs a token of this shape, not of Llama 1's 30B.
NARROW_30B = replace(preset("llama-30b"), hidden_size=6144, n_heads=48, n_kv_heads=48, intermediate_size=16384)


def paper_workload(name: str, nodes: int) -> Workload:
    """The workload of section VI.A, whose updates are not overlapped."""
    overlap = frozenset(OVERLAPS) - {"updates"}
    profile = synthesize(A800, nodes)
    return Workload(preset(name), Mesh(8, nodes), A800, profile, recompute=name == "llama-30b", overlap=overlap)


def leaves(found: dict[str, Any]) -> dict[str, Any]:
    """The values of a prediction by their paths, so that numbers can be compared with a tolerance."""
    parts = [(name, value if isinstance(value, dict) else {"": value}) for name, value in found.items()]
    return {f"{name} {key}": value for name, inner in parts for key, value in inner.items()}


@pytest.mark.parametrize("name", TABLE_IV)
def test_plans_and_their_predictions_have_not_changed(name: str) -> None:
    workload, stored = paper_workload(name, 128), STORED["rows"][name]
    chosen = choose(workload, MEMORY, "communication")[0]
    assert leaves(as_json(chosen)) == pytest.approx(leaves(stored["chosen_on_1024"]))
    assert leaves(as_json(predict(workload, Sharding.parse(TABLE_IV[name])))) == pytest.approx(leaves(stored["of_table_iv"]))


def test_throughputs_are_those_of_the_paper() -> None:
    """Table V, with which the four unknown figures of the cluster were fitted: the root mean square of the relative errors."""
    errors = []
    for name, rows in TABLE_V.items():
        config = NARROW_30B if name == "llama-30b" else preset(name)
        for overlap, stated in zip(OVERLAP_ROWS, rows, strict=True):
            for count, tokens in zip(MICRO_BATCHES, stated, strict=True):
                mesh, profile = Mesh(8, 8), synthesize(A800, 8)
                workload = Workload(config, mesh, A800, profile, recompute=name == "llama-30b", overlap=frozenset(overlap))
                workload = replace(workload, global_batch=mesh.size * workload.tokens * count)
                predicted = predict(workload, Sharding.parse(TABLE_IV[name])).tokens_per_gpu_second
                errors.append((predicted / tokens - 1) ** 2)
    assert (sum(errors) / len(errors)) ** 0.5 == pytest.approx(0.058, abs=0.001)


def test_the_filters_leave_as_many_plans_as_before() -> None:
    mesh = Mesh(8, 128)
    found = {"first_filter": len(shardings(tiling_meshes(mesh))), "both_filters": len(shardings(filtered_meshes(mesh)))}
    assert found == STORED["plans"]

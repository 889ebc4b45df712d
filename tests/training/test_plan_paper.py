"""The plans for AMSP's 1,024 A800s are those of docs/results/plan-paper.json, which the paper's were compared with."""

import json
from typing import Any

import pytest

from checkpoints.presets import preset
from comm.cluster import load_cluster
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


def test_the_filters_leave_as_many_plans_as_before() -> None:
    mesh = Mesh(8, 128)
    found = {"first_filter": len(shardings(tiling_meshes(mesh))), "both_filters": len(shardings(filtered_meshes(mesh)))}
    assert found == STORED["plans"]

"""What the planner knows about a cluster: its GPUs, the links inside a node, and the network between nodes.

A cluster file has a name and one `{"value": …, "source": …}` for each figure. `clusters/` contains some.
Bandwidths are those of one direction.
"""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from errors import UserError

CLUSTERS = Path(__file__).parent.parent / "clusters"


@dataclass(frozen=True)
class Cluster:
    """Figures of one GPU, one node and the network. GB is 1e9 bytes."""

    name: str
    # a GPU
    gpus_per_node: int
    memory_gb: float
    bfloat16_tflops: float  # peak of dense matrix products
    float32_tflops: float
    compute_efficiency: float  # the share of the peak that a training step reaches if no communication is exposed
    memory_gb_per_second: float  # bandwidth of the GPU's memory, reads plus writes
    overlap_share: float  # the share of the computing time that can hide communication
    start_latency_us: float  # fixed cost of every collective
    # links inside a node
    link_gb_per_second: float  # of one GPU to the others of its node
    link_efficiency: float  # the share of link_gb_per_second that large collectives reach
    link_latency_us: float  # of one hop of a ring
    # the network
    node_gb_per_second: float  # of all the network cards of a node together
    node_efficiency: float
    node_latency_us: float
    nodes_per_leaf: int  # nodes under one leaf switch; 0: unknown, then all nodes count as under one
    spine_share: float  # the share of a node's bandwidth that is available through the spine switches
    sources: dict[str, str] = field(default_factory=dict, compare=False, hash=False)  # figure: where it comes from

    def peak_flops(self, precision: str) -> float:
        """FLOP/s of one GPU; precision: `bfloat16` or `float32`."""
        return 1e12 * (self.bfloat16_tflops if precision == "bfloat16" else self.float32_tflops)


FIGURES = tuple(f for f in fields(Cluster) if f.name not in ("name", "sources"))
SHARES = ("compute_efficiency", "overlap_share", "link_efficiency", "node_efficiency", "spine_share")
MAY_BE_ZERO = ("overlap_share", "nodes_per_leaf", "start_latency_us", "link_latency_us", "node_latency_us")


def shipped_clusters() -> list[str]:
    """The names that `load_cluster` knows."""
    return sorted(path.stem for path in CLUSTERS.glob("*.json"))


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, or a file by path. Raises UserError for an unknown, unreadable or incomplete one."""
    path = Path(name) if name.endswith(".json") else CLUSTERS / f"{name}.json"
    if not path.exists():
        raise UserError(
            f"no cluster {name!r}; shipped: {', '.join(shipped_clusters())}; or give the path of a .json file of the same form"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read as JSON ({e}); copy a file of {CLUSTERS} and change its figures") from None
    try:
        return _cluster(raw)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None


def _cluster(raw: Any) -> Cluster:
    """Check each figure and keep its source."""
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not isinstance(raw.get("figures"), dict):
        raise UserError(f'a cluster file needs "name" and "figures"; copy one of {CLUSTERS} and change its figures')
    figures: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for wanted in FIGURES:
        entry = raw["figures"].get(wanted.name)
        if not isinstance(entry, dict) or not {"value", "source"} <= entry.keys():
            raise UserError(f'figure {wanted.name} is missing; write {{"value": …, "source": "where it comes from"}}')
        value, least = entry["value"], 0 if wanted.name in MAY_BE_ZERO else 1 if wanted.type is int else 1e-9
        kinds = (int,) if wanted.type is int else (int, float)
        most = 1.0 if wanted.name in SHARES else math.inf
        if type(value) not in kinds or not least <= value <= most or value == math.inf:
            limit = "from 0 to 1" if wanted.name in SHARES else "a whole number" if wanted.type is int else "a positive number"
            raise UserError(f"figure {wanted.name} must be {limit}, not {value!r}")
        figures[wanted.name], sources[wanted.name] = value, str(entry["source"])
    unknown = sorted(raw["figures"].keys() - figures.keys())
    if unknown:
        raise UserError(f"unknown figure(s) {', '.join(unknown)}; known: {', '.join(figures)}")
    return Cluster(name=raw["name"], sources=sources, **figures)

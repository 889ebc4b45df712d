"""How long a collective takes: a profile of measured or synthesized times, interpolated (AMSP, section IV.A).

    seconds(operation, bytes, mesh) = bytes / effective bandwidth(operation, bytes, mesh)

`bytes` is the size of the whole tensor: the output of an all-gather, the input of a reduce-scatter, the tensor that is
all-reduced or broadcast. A `mesh` a x b stands for groups of a GPUs on each of b nodes. The other GPUs of these nodes run the
same collective in groups of their own at the same time, as in training. So the R / a groups of a node with R GPUs share its
network cards.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from comms.cluster import Cluster
from errors import UserError
from training.sharding import Mesh

OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")


class Point(NamedTuple):
    """One measurement."""

    operation: str
    mesh: Mesh
    bytes: int
    seconds: float


class Profile:
    """Times of collectives on one cluster. `name` says where they come from."""

    def __init__(self, name: str, gpus_per_node: int, points: Iterable[Point]) -> None:
        self.name, self.gpus_per_node = name, gpus_per_node
        self.points = sorted(points)
        self._curves: dict[str, dict[Mesh, list[Point]]] = {operation: {} for operation in OPERATIONS}
        for point in self.points:
            self._curves[point.operation].setdefault(point.mesh, []).append(point)
        self._known: dict[tuple[str, float, Mesh], float] = {}

    def seconds(self, operation: str, size: float, mesh: Mesh) -> float:
        """The time of `operation` on `size` bytes. 0 for one GPU or no bytes.

        Raises UserError if `mesh` is neither a profiled mesh nor between two of them.
        """
        if mesh.size == 1 or size == 0:
            return 0.0
        key = (operation, size, mesh)
        if key not in self._known:
            self._known[key] = size / self._bandwidth(operation, size, mesh)
        return self._known[key]

    def _bandwidth(self, operation: str, size: float, mesh: Mesh) -> float:
        """Effective bytes/s: as profiled, or interpolated between the two nearest profiled meshes that differ from `mesh`
        only in nodes, or only in GPUs per node. The interpolation is linear in the logarithm of that number."""
        curves = self._curves[operation]
        if mesh in curves:
            return size / _time(curves[mesh], size)
        # Groups inside a node and groups across nodes use different links: do not interpolate between 1 node and more.
        rows = [m for m in curves if m.gpus == mesh.gpus and m.nodes > 1 and mesh.nodes > 1]
        columns = [m for m in curves if m.nodes == mesh.nodes]
        for candidates, axis in ((rows, "nodes"), (columns, "gpus")):
            wanted = getattr(mesh, axis)
            below = max((m for m in candidates if getattr(m, axis) < wanted), default=None)
            above = min((m for m in candidates if getattr(m, axis) > wanted), default=None)
            if below is not None and above is not None:
                low, high = getattr(below, axis), getattr(above, axis)
                weight = math.log(wanted / low) / math.log(high / low)
                return (1 - weight) * size / _time(curves[below], size) + weight * size / _time(curves[above], size)
        known = ", ".join(str(m) for m in sorted(curves)) or "none"
        raise UserError(
            f"profile {self.name} has no {operation} over {mesh} (GPUs a node x nodes), only over {known}; profile the cluster "
            "itself with make profile-collectives, or leave --profile out to compute the times from the cluster's links"
        )


def _time(curve: Sequence[Point], size: float) -> float:
    """Seconds at `size` bytes. Linear between two sizes, which is exact for latency + bytes / bandwidth. Below the
    smallest size: its time. Above the largest size: its bandwidth."""
    after = bisect_right(curve, size, key=lambda p: p.bytes)
    if after == 0:
        return curve[0].seconds
    if after == len(curve):
        return size * curve[-1].seconds / curve[-1].bytes
    low, high = curve[after - 1], curve[after]
    return low.seconds + (high.seconds - low.seconds) * (size - low.bytes) / (high.bytes - low.bytes)


# --- synthesis -----------------------------------------------------------------------------------------------------------


def link_seconds(cluster: Cluster, operation: str, size: float, mesh: Mesh) -> float:
    """Seconds of one collective for groups of shape `mesh`, from link speeds and latencies.

    The cost model is that of Thakur & Gropp (2003) for rings of p = a * b GPUs. In an all-gather or reduce-scatter each
    GPU sends (p - 1) / p of the bytes over p - 1 hops, b - 1 of them between nodes. An all-reduce takes twice that. A
    broadcast is pipelined along the ring. An all-reduce may also use a double binary tree (Sanders et al., 2009). A tree
    sends all bytes up and down, but over only log2(b) hops between nodes. The faster of ring and tree is used, as NCCL
    does.
    """
    p, a, b = mesh.size, mesh.gpus, mesh.nodes
    bandwidth = cluster.link_gb_per_second * cluster.link_efficiency
    if b > 1:
        spine = cluster.spine_share if 0 < cluster.nodes_per_leaf < b else 1.0
        of_node = cluster.node_gb_per_second * cluster.node_efficiency * spine
        bandwidth = min(bandwidth, of_node * a / cluster.gpus_per_node)
    wire = size / (bandwidth * 1e9)
    start, link, network = (us * 1e-6 for us in (cluster.start_latency_us, cluster.link_latency_us, cluster.node_latency_us))
    hops = (p - b) * link + (b - 1) * network
    if operation == "broadcast":
        return start + wire + hops
    ring = (p - 1) / p * wire + hops
    if operation in ("all-gather", "reduce-scatter"):
        return start + ring
    tree = wire + (a - 1) * link + math.ceil(math.log2(b)) * network
    return start + 2 * min(ring, tree)


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def synthesize(cluster: Cluster, nodes: int) -> Profile:
    """A profile for `nodes` nodes from the cluster's link speeds and latencies: all meshes that tile them, 1 KiB to 256 GiB."""
    sizes = [2**i for i in range(10, 39, 2)]
    meshes = [Mesh(a, b) for a in divisors(cluster.gpus_per_node) for b in divisors(nodes) if a * b > 1]
    points = [
        Point(operation, mesh, size, link_seconds(cluster, operation, size, mesh))
        for operation in OPERATIONS
        for mesh in meshes
        for size in sizes
    ]
    return Profile(f"synthesized from the links of {cluster.name}", cluster.gpus_per_node, points)


# --- on disk -------------------------------------------------------------------------------------------------------------


def write_profile(path: Path, profile: Profile, about: dict[str, Any]) -> None:
    """Write a profile as JSON. about: what it was measured on."""
    points = [[p.operation, p.mesh.gpus, p.mesh.nodes, p.bytes, p.seconds] for p in profile.points]
    content = {"gpus_per_node": profile.gpus_per_node, **about, "columns": "operation, GPUs a node, nodes, bytes, seconds"}
    rows = ",\n  ".join(json.dumps(row) for row in points)
    path.write_text(json.dumps(content, indent=1)[:-2] + f',\n "points": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises UserError if the file is missing, is not JSON, or is not a profile."""
    mend = "measure one with make profile-collectives"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"profile {path} cannot be read as JSON ({e}); {mend}") from None
    try:
        gpus = raw["gpus_per_node"]
        points = [Point(operation, Mesh(a, b), size, seconds) for operation, a, b, size, seconds in raw["points"]]
        sound = type(gpus) is int and bool(points) and all(_sound(point) for point in points)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise UserError(
            f"profile {path} is broken: it needs gpus_per_node and points, each an operation ({', '.join(OPERATIONS)}), GPUs a "
            f"node, nodes, bytes and seconds above 0; {mend}"
        )
    return Profile(path.name, gpus, points)


def _sound(point: Point) -> bool:
    counts = (point.mesh.gpus, point.mesh.nodes, point.bytes)
    whole = all(type(n) is int and n >= 1 for n in counts)
    return whole and point.operation in OPERATIONS and isinstance(point.seconds, float) and 0 < point.seconds < math.inf


def profile_for(cluster: Cluster, mesh: Mesh, path: Path | None) -> tuple[Cluster, Profile]:
    """`cluster` with `mesh.gpus` GPUs per node, and its profile: read from `path`, or synthesized without one.

    Raises UserError if it was measured on nodes of another size.
    """
    cluster = replace(cluster, gpus_per_node=mesh.gpus)
    profile = read_profile(path) if path else synthesize(cluster, mesh.nodes)
    if profile.gpus_per_node != mesh.gpus:
        raise UserError(
            f"profile {path} was made on nodes of {profile.gpus_per_node} GPUs; give --gpus-per-node {profile.gpus_per_node}, or profile this cluster"
        )
    return cluster, profile

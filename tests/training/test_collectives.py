"""Profiles of collectives: synthesis from link speeds, interpolation, the file, and measurement on gloo ranks."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from comms.cluster import CLUSTERS, FIGURES, Cluster, load_cluster, shipped_clusters
from errors import UserError
from tests.support.ranks import Ranks
from tp import World
from training.groups import block_of, blocks_of
from training.planner.collectives import OPERATIONS, Point, Profile, link_seconds, read_profile, synthesize, write_profile
from training.profile_collectives import measure
from training.sharding import Mesh


def cluster(**more: Any) -> Cluster:
    """A cluster with round figures: 100 GB/s and 1 µs between GPUs, nodes of 8 GPUs, 40 GB/s and 10 µs between nodes."""
    plain = replace(
        load_cluster("a800"),
        link_gb_per_second=100.0,
        link_efficiency=1.0,
        node_gb_per_second=80.0,
        node_efficiency=0.5,
        start_latency_us=5.0,
        link_latency_us=1.0,
        node_latency_us=10.0,
        nodes_per_leaf=0,
        spine_share=1.0,
    )
    return replace(plain, **more)


# --- synthesis -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "mesh", "seconds"),
    [
        # 1 GB at 100 GB/s is 10 ms
        ("all-gather", Mesh(8, 1), 5e-6 + 7 / 8 * 10e-3 + 7e-6),
        ("reduce-scatter", Mesh(4, 1), 5e-6 + 3 / 4 * 10e-3 + 3e-6),
        ("broadcast", Mesh(2, 1), 5e-6 + 10e-3 + 1e-6),
        ("all-reduce", Mesh(2, 1), 5e-6 + 2 * (1 / 2 * 10e-3 + 1e-6)),
        # across nodes: the groups that the 8 GPUs of a node form share its 40 GB/s
        ("all-gather", Mesh(8, 2), 5e-6 + 15 / 16 * 25e-3 + 14e-6 + 10e-6),
        ("broadcast", Mesh(4, 2), 5e-6 + 50e-3 + 6e-6 + 10e-6),
        ("all-reduce", Mesh(1, 2), 5e-6 + 2 * (1 / 2 * 200e-3 + 10e-6)),
    ],
)
def test_link_times_by_hand(operation: str, mesh: Mesh, seconds: float) -> None:
    assert link_seconds(cluster(), operation, 1e9, mesh) == pytest.approx(seconds, rel=1e-12)


def test_a_small_all_reduce_over_many_nodes_takes_the_tree() -> None:
    """A tree over 128 nodes has 7 levels, to be passed twice. The ring has 127 hops, to be passed twice."""
    tree = 5e-6 + 2 * (1e3 / (40e9 / 8) + 7 * 10e-6)
    assert link_seconds(cluster(), "all-reduce", 1e3, Mesh(1, 128)) == pytest.approx(tree, rel=1e-12)
    ring = 5e-6 + 2 * (127 / 128 * 1e9 / (40e9 / 8) + 127 * 10e-6)
    assert link_seconds(cluster(), "all-reduce", 1e9, Mesh(1, 128)) == pytest.approx(ring, rel=1e-12)


def test_beyond_a_leaf_the_spine_is_narrower() -> None:
    narrow = cluster(nodes_per_leaf=4, spine_share=0.25)
    for operation in OPERATIONS:
        assert link_seconds(narrow, operation, 1e9, Mesh(8, 4)) == link_seconds(cluster(), operation, 1e9, Mesh(8, 4))
        slower = link_seconds(narrow, operation, 1e9, Mesh(8, 8)) / link_seconds(cluster(), operation, 1e9, Mesh(8, 8))
        assert 3.9 < slower <= 4.0


def test_a_synthesized_profile_gives_the_links_times(seed: int) -> None:
    draw, links = random.Random(seed), cluster()
    profile = synthesize(links, 12)
    for _ in range(200):
        operation = draw.choice(OPERATIONS)
        mesh = Mesh(draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 3, 4, 6, 12)))
        size = 2 ** draw.uniform(10, 38)
        expected = link_seconds(links, operation, size, mesh) if mesh.size > 1 else 0.0
        # if the tree is faster at one size and the ring at the next, the line between them is slightly below both
        assert profile.seconds(operation, size, mesh) == pytest.approx(
            expected, rel=0.05 if operation == "all-reduce" else 1e-9
        )


# --- interpolation ---------------------------------------------------------------------------------------------------------


def times(operation: str, mesh: Mesh, *pairs: tuple[int, float]) -> list[Point]:
    return [Point(operation, mesh, size, seconds) for size, seconds in pairs]


def test_between_two_sizes_time_is_linear(seed: int) -> None:
    draw = random.Random(seed)
    latency, per_byte = draw.uniform(1e-6, 1e-3), draw.uniform(1e-11, 1e-9)
    sizes = sorted(draw.sample(range(1000, 10**8), 6))
    profile = Profile("test", 8, [Point("broadcast", Mesh(8), n, latency + n * per_byte) for n in sizes])
    for _ in range(50):
        size = draw.uniform(sizes[0], sizes[-1])
        assert profile.seconds("broadcast", size, Mesh(8)) == pytest.approx(latency + size * per_byte, rel=1e-9)


def test_outside_of_the_measured_sizes() -> None:
    profile = Profile("test", 8, times("all-gather", Mesh(8), (1000, 1e-3), (2000, 1.5e-3)))
    assert profile.seconds("all-gather", 10, Mesh(8)) == pytest.approx(1e-3)  # the latency of the smallest size
    assert profile.seconds("all-gather", 8000, Mesh(8)) == pytest.approx(6e-3)  # the bandwidth of the largest size
    assert profile.seconds("all-gather", 2000, Mesh(8)) == pytest.approx(1.5e-3)
    assert profile.seconds("all-gather", 0, Mesh(8)) == profile.seconds("all-gather", 1000, Mesh(1)) == 0.0


def test_between_two_meshes_bandwidth_is_linear_in_the_logarithm() -> None:
    points = times("all-reduce", Mesh(8, 2), (1000, 1e-3)) + times("all-reduce", Mesh(8, 32), (1000, 4e-3))
    profile = Profile("test", 8, points)
    # log(8) is half-way between log(2) and log(32), so the bandwidth is half-way between 1e6 and 2.5e5 bytes/s
    assert profile.seconds("all-reduce", 1000, Mesh(8, 8)) == pytest.approx(1000 / 6.25e5)
    quarter = 1e6 + (math.log(4 / 2) / math.log(16)) * (2.5e5 - 1e6)
    assert profile.seconds("all-reduce", 1000, Mesh(8, 4)) == pytest.approx(1000 / quarter)
    columns = Profile("test", 8, times("broadcast", Mesh(2), (8, 1.0)) + times("broadcast", Mesh(8), (8, 4.0)))
    assert columns.seconds("broadcast", 8, Mesh(4)) == pytest.approx(8 / 5.0)


@pytest.mark.parametrize("mesh", [Mesh(8, 64), Mesh(4, 8), Mesh(8, 1), Mesh(4, 1)])
def test_no_guess_beyond_what_was_profiled(mesh: Mesh) -> None:
    points = times("all-reduce", Mesh(8, 2), (1000, 1e-3)) + times("all-reduce", Mesh(8, 32), (1000, 4e-3))
    with pytest.raises(UserError, match="make profile-collectives") as failed:
        Profile("test", 8, points).seconds("all-reduce", 1000, mesh)
    assert str(mesh) in str(failed.value) and "8x32" in str(failed.value)


# --- files -----------------------------------------------------------------------------------------------------------------


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    profile = synthesize(cluster(), 4)
    write_profile(tmp_path / "profile.json", profile, {"device": "none"})
    back = read_profile(tmp_path / "profile.json")
    assert back.points == profile.points and back.gpus_per_node == 8
    assert json.loads((tmp_path / "profile.json").read_text())["device"] == "none"


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"gpus_per_node": 8, "points": []}',
        '{"gpus_per_node": 8, "points": [["all-gather", 8, 1, 1024]]}',
        '{"gpus_per_node": 8, "points": [["gossip", 8, 1, 1024, 0.1]]}',
        '{"gpus_per_node": 8, "points": [["all-gather", 8, 1, 1024, 0.0]]}',
        '{"gpus_per_node": 8, "points": [["all-gather", 8, 0, 1024, 0.1]]}',
        '{"gpus_per_node": "8", "points": [["all-gather", 8, 1, 1024, 0.1]]}',
        '{"gpus_per_node": 8, "points": [["all-gather", 8, 1, 1024, "fast"]]}',
        '{"gpus_per_node": 8, "points": 7}',
    ],
)
def test_a_broken_profile_says_how_to_make_one(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="make profile-collectives") as failed:
        read_profile(path)
    assert "profile.json" in str(failed.value)


def test_every_shipped_figure_says_where_it_comes_from() -> None:
    assert {"a800", "h100", "h200"} <= set(shipped_clusters())
    for name in shipped_clusters():
        shipped = load_cluster(name)
        assert set(shipped.sources) == {figure.name for figure in FIGURES}
        assert all(len(source) > 10 for source in shipped.sources.values()), name


@pytest.mark.parametrize(
    ("change", "mend"),
    [
        (lambda raw: raw.pop("figures"), "copy one of"),
        (lambda raw: raw["figures"].pop("memory_gb"), "memory_gb is missing"),
        (lambda raw: raw["figures"].update(memory_gb=80), "where it comes from"),
        (lambda raw: raw["figures"]["memory_gb"].update(value=-1), "memory_gb must be a positive number"),
        (lambda raw: raw["figures"]["memory_gb"].update(value=True), "memory_gb must be"),
        (lambda raw: raw["figures"]["gpus_per_node"].update(value=7.5), "gpus_per_node must be a whole number"),
        (lambda raw: raw["figures"]["overlap_share"].update(value=1.5), "overlap_share must be from 0 to 1"),
        (lambda raw: raw["figures"].update(memory={"value": 1, "source": ""}), "unknown figure.*memory"),
    ],
)
def test_a_broken_cluster_file_names_the_figure(tmp_path: Path, change: Any, mend: str) -> None:
    raw = json.loads((CLUSTERS / "a800.json").read_text())
    change(raw)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=mend):
        load_cluster(str(path))


# --- measuring -------------------------------------------------------------------------------------------------------------


def measured(world: World) -> list[Point]:
    return measure(world, Mesh(2, 2), [1000, 40_000], repeats=2).points


def test_measuring_gives_each_operation_mesh_and_size(ranks: Ranks) -> None:
    by_rank = ranks.run(4, measured)
    points = by_rank[0]
    assert by_rank == [points] * 4, "the ranks must agree on every time"
    assert {(p.operation, p.mesh) for p in points} == {(o, m) for o in OPERATIONS for m in (Mesh(1, 2), Mesh(2, 1), Mesh(2, 2))}
    assert {p.bytes for p in points} == {1000, 1008, 40_000}  # 1000 bytes are 250 floats, which 4 does not divide
    assert all(0 < p.seconds < 10 for p in points)


def test_groups_are_blocks_of_the_grid() -> None:
    grid = Mesh(4, 4)  # rank = 4 * node + GPU

    def blocks(mesh: Mesh) -> list[list[int]]:
        return blocks_of(partial(block_of, mesh=mesh, cluster=grid), 16)

    assert blocks(Mesh(2, 1)) == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert blocks(Mesh(1, 2)) == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert blocks(Mesh(2, 2)) == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert blocks(Mesh(4, 4)) == [list(range(16))]

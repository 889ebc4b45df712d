"""The process groups of one sharding: which ranks hold the parts of the same copy, and which hold the same part.

Rank r is GPU r % R of node r // R, in a cluster of N nodes with R GPUs each. A mesh a x b tiles this grid with blocks.
The ranks of a P block together hold one copy of the parameters. The ranks at the same position of their P blocks hold the
same part.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist

from training.sharding import Mesh, Sharding


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, including this one. `handle` is None if this rank is the only one."""

    ranks: tuple[int, ...]  # ascending, as numbered by torch.distributed
    index: int  # of this rank in `ranks`
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Coordinates:
    """A rank's position: its part of P, then which part of that for G, then which part of that for OS."""

    parameters: int  # 0 … |P| - 1
    gradients: int  # 0 … |G| / |P| - 1
    optimizer: int  # 0 … |OS| / |G| - 1
    copy: int  # which of the copies of the optimizer states: 0 … ranks / |OS| - 1


def coordinates_of(rank: int, sharding: Sharding, cluster: Mesh) -> Coordinates:
    """Split a rank's grid coordinates into its positions in the nested meshes."""
    node, gpu = divmod(rank, cluster.gpus)
    positions = []
    inner = Mesh(1, 1)
    for outer in (sharding.parameters, sharding.gradients, sharding.optimizer, cluster):
        across = outer.gpus // inner.gpus
        positions.append(node % outer.nodes // inner.nodes * across + gpu % outer.gpus // inner.gpus)
        inner = outer
    return Coordinates(*positions)


@dataclass(frozen=True)
class Groups:
    """This rank's groups under one sharding.

    gather, scatter: the ranks of a P block, for all-gather and reduce-scatter. With a group for each, both can run at the
    same time.
    gradients, optimizer, replicas: the ranks with the same part of P in a G block, in an OS block, and in the whole cluster.
    copy: all ranks of an OS block, which together own the optimizer states of each parameter once.
    """

    coordinates: Coordinates
    gather: Group
    scatter: Group
    gradients: Group
    replicas: Group
    optimizer: Group
    copy: Group
    owners: dict[int, int]  # part of the optimizer states: its owner among the ranks of `optimizer`
    parts: tuple[int, int]  # how many parts G cuts a P part into, and OS each of those

    @property
    def in_order(self) -> bool:
        """Whether the ranks of `optimizer`, in ascending order, own the parts in ascending order."""
        return [self.owners[part] for part in sorted(self.owners)] == list(self.optimizer.ranks)

    @property
    def part(self) -> int:
        """This rank's part of the optimizer states of its P part: 0 … |OS| / |P| - 1."""
        return _part(self.coordinates, self.parts)


def _part(of: Coordinates, parts: tuple[int, int]) -> int:
    return of.gradients * parts[1] + of.optimizer


Split = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1)
def _made(world: dist.ProcessGroup | None) -> dict[tuple[str, Split], dict[tuple[int, ...], dist.ProcessGroup]]:
    """The groups made so far, apart from that of all ranks, `world`. They are kept because NCCL takes a tenth of a second
    to make one, and the next run in the same processes needs mostly the same groups."""
    return {}


def _handle(name: str, split: Split, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of `ranks`, one part of `split`. Collective.

    Another `name` gives another group of the same ranks, and both can be used at the same time. Every rank creates all
    groups of a split, including those without it, because NCCL splits them off the communicator of all ranks, which is a
    collective call.
    """
    made = _made(dist.group.WORLD)
    if (name, split) not in made:
        made[name, split] = {some: dist.new_group(list(some)) for some in split if len(some) > 1}
    return made[name, split][ranks]


def block_of(rank: int, mesh: Mesh, cluster: Mesh) -> tuple[int, int]:
    """Which of the blocks of shape `mesh` contains a rank: its place among the nodes and among the GPUs."""
    return rank // cluster.gpus // mesh.nodes, rank % cluster.gpus // mesh.gpus


def blocks_of(key: Callable[[int], Hashable], ranks: int) -> list[list[int]]:
    """The ranks with the same `key`, in ascending order."""
    by_key: dict[Hashable, list[int]] = {}
    for rank in range(ranks):
        by_key.setdefault(key(rank), []).append(rank)
    return list(by_key.values())


def make_groups(rank: int, sharding: Sharding, cluster: Mesh) -> Groups:
    """Create this rank's process groups. Collective: every rank must call it, with the same arguments except `rank`."""
    coordinates = [coordinates_of(r, sharding, cluster) for r in range(cluster.size)]
    mine = coordinates[rank]
    p, g, o = sharding.parameters, sharding.gradients, sharding.optimizer
    parts = (g.size // p.size, o.size // g.size)

    def group(name: str, key: Callable[[int], Hashable]) -> Group:
        """This rank's group, where ranks with the same `key` form a group."""
        split = tuple(map(tuple, blocks_of(key, cluster.size)))
        ranks = next(some for some in split if rank in some)
        return Group(ranks, ranks.index(rank), _handle(name, split, ranks) if len(ranks) > 1 else None)

    def same_block(mesh: Mesh) -> Callable[[int], Hashable]:
        return lambda r: block_of(r, mesh, cluster)

    def same_part(mesh: Mesh) -> Callable[[int], Hashable]:
        return lambda r: (block_of(r, mesh, cluster), coordinates[r].parameters)

    optimizer = group("optimizer", same_part(o))
    return Groups(
        coordinates=mine,
        gather=group("gather", same_block(p)),
        scatter=group("scatter", same_block(p)),
        gradients=group("gradients", same_part(g)),
        replicas=group("replicas", same_part(cluster)),
        optimizer=optimizer,
        copy=group("copy", same_block(o)),
        owners={_part(coordinates[r], parts): r for r in optimizer.ranks},
        parts=parts,
    )

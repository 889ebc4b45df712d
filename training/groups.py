"""The process groups of one sharding: which ranks hold the parts of the same copy, and which hold the same part.

Rank r is GPU r % R of node r // R of a cluster of N nodes with R GPUs each. A mesh a x b tiles that grid into blocks. Ranks of
a P block hold the parts of one copy of the parameters; ranks at the same position of their P blocks hold the same part.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist

from training.sharding import Mesh, Sharding


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate, this one among them. `handle` is None where it is alone."""

    ranks: tuple[int, ...]  # ascending, as torch.distributed numbers them
    index: int  # of this rank among them
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Place:
    """Where a rank lies: its part of P, and of what its P part is cut into for G and, further, for OS."""

    parameters: int  # 0 … |P| - 1
    gradients: int  # 0 … |G| / |P| - 1
    optimizer: int  # 0 … |OS| / |G| - 1
    copy: int  # which of the copies of the optimizer states: 0 … ranks / |OS| - 1


def place(rank: int, sharding: Sharding, cluster: Mesh) -> Place:
    """Split a rank's grid coordinates into its positions in the nested meshes."""
    node, gpu = divmod(rank, cluster.gpus)
    positions = []
    inner = Mesh(1, 1)
    for outer in (sharding.parameters, sharding.gradients, sharding.optimizer, cluster):
        across = outer.gpus // inner.gpus
        positions.append(node % outer.nodes // inner.nodes * across + gpu % outer.gpus // inner.gpus)
        inner = outer
    return Place(*positions)


@dataclass(frozen=True)
class Groups:
    """This rank's groups under one sharding of a kind of state.

    gather, scatter: the parts of one copy of P, for all-gather and reduce-scatter, which may then run at the same time.
    gradients: the ranks of a G mesh with the same part of P. optimizer: the same of an OS mesh. replicas: of the cluster.
    copy: all ranks of an OS mesh, which together own each parameter's states once.
    """

    place: Place
    gather: Group
    scatter: Group
    gradients: Group
    replicas: Group
    optimizer: Group
    copy: Group
    owners: dict[int, int]  # part of the optimizer states to the rank that owns it, in this rank's `optimizer` group
    parts: tuple[int, int]  # into how many parts G and then OS cut a P part

    @property
    def in_order(self) -> bool:
        """Whether the ranks of `optimizer` own its parts in the order of their numbers."""
        return [self.owners[part] for part in sorted(self.owners)] == list(self.optimizer.ranks)

    @property
    def part(self) -> int:
        """This rank's part of the optimizer states of its P part: 0 … |OS| / |P| - 1."""
        return _part(self.place, self.parts)


def _part(of: Place, parts: tuple[int, int]) -> int:
    return of.gradients * parts[1] + of.optimizer


Split = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1)
def _made(world: dist.ProcessGroup | None) -> dict[tuple[str, Split], dict[tuple[int, ...], dist.ProcessGroup]]:
    """The groups made so far beside that of all ranks. They are kept, because NCCL takes a tenth of a second to make one, and
    the next run in the same processes needs mostly the same."""
    return {}


def _handle(name: str, split: Split, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of `ranks`, one part of `split`. Under another `name` it is another one, which may be used at the same
    time. Every rank creates all of a split's, a member or not: NCCL splits them off the communicator of all ranks, which is a
    collective call."""
    made = _made(dist.group.WORLD)
    if (name, split) not in made:
        made[name, split] = {some: dist.new_group(list(some)) for some in split if len(some) > 1}
    return made[name, split][ranks]


def make_groups(rank: int, sharding: Sharding, cluster: Mesh) -> Groups:
    """Create this rank's process groups. Every rank must call it, with the same arguments but its rank."""
    places = [place(r, sharding, cluster) for r in range(cluster.size)]
    mine = places[rank]
    p, g, o = sharding.parameters, sharding.gradients, sharding.optimizer
    parts = (g.size // p.size, o.size // g.size)

    def group(name: str, key: Callable[[int], Hashable]) -> Group:
        """This rank's of the groups that `key` tells apart."""
        by_key: dict[Hashable, list[int]] = {}
        for r in range(cluster.size):
            by_key.setdefault(key(r), []).append(r)
        split = tuple(map(tuple, by_key.values()))
        ranks = next(some for some in split if rank in some)
        return Group(ranks, ranks.index(rank), _handle(name, split, ranks) if len(ranks) > 1 else None)

    def same_block(mesh: Mesh) -> Callable[[int], tuple[int, int]]:
        return lambda r: (r // cluster.gpus // mesh.nodes, r % cluster.gpus // mesh.gpus)

    def same_part(mesh: Mesh) -> Callable[[int], Hashable]:
        return lambda r: (same_block(mesh)(r), places[r].parameters)

    optimizer = group("optimizer", same_part(o))
    return Groups(
        place=mine,
        gather=group("gather", same_block(p)),
        scatter=group("scatter", same_block(p)),
        gradients=group("gradients", same_part(g)),
        replicas=group("replicas", same_part(cluster)),
        optimizer=optimizer,
        copy=group("copy", same_block(o)),
        owners={_part(places[r], parts): r for r in optimizer.ranks},
        parts=parts,
    )

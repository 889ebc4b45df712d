"""Orders the nodes so that the groups of a plan span few leaf switches (AMSP, section V.D).

A mesh over b nodes takes b nodes with consecutive numbers. Nodes under the same leaf switch communicate without crossing the
spine. `spans` counts the leaf switches that each group spans, summed over groups. `order_for_groups` minimizes this number.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path

from errors import UserError
from training.sharding import Sharding

EXACT_STATES = 200_000  # of the exact search at most; beyond that, leaves are joined in order of size


def spans(leaves: Sequence[str], size: int) -> int:
    """The number of leaf switches that each group of `size` consecutive nodes spans, summed over groups. leaves: each
    node's switch."""
    return sum(len(set(leaves[start : start + size])) for start in range(0, len(leaves), size))


def order_for_groups(leaves: Sequence[str], size: int) -> list[int]:
    """The nodes (indices into `leaves`) in an order in which groups of `size` span the fewest leaf switches.

    Consider the graph of leaves and groups with an edge where a group takes nodes of a leaf. `spans` counts its edges. Without
    cycles their number is leaves + groups - components, and a component is a set of leaves whose nodes fill whole groups. So
    the order with the most such sets has the fewest spans. Within a set, the leaves can follow each other in any order. The
    search for these sets is exact up to EXACT_STATES. Raises UserError if `size` does not divide the number of nodes.
    """
    if len(leaves) % size:
        raise UserError(f"{len(leaves)} nodes cannot be divided into groups of {size}; list a multiple of {size} nodes")
    nodes: dict[str, list[int]] = defaultdict(list)
    for node, leaf in enumerate(leaves):
        nodes[leaf].append(node)
    waiting: dict[int, list[str]] = defaultdict(list)  # leaves by the number of nodes left over after whole groups
    for leaf in sorted(nodes, key=lambda name: (-len(nodes[name]), nodes[name])):
        waiting[len(nodes[leaf]) % size].append(leaf)
    ordered = waiting.pop(0, [])
    for rest in sorted(waiting):  # two leaves whose remainders fill one group always belong together
        other = size - rest
        while waiting[rest] and waiting.get(other) and (rest != other or len(waiting[rest]) > 1):
            ordered += [waiting[rest].pop(0), waiting[other].pop(0)]
    ordered += [waiting[rest].pop(0) for rest in _most_sets({rest: len(names) for rest, names in waiting.items()}, size)]
    return [node for leaf in ordered for node in nodes[leaf]]


def _most_sets(counts: dict[int, int], size: int) -> list[int]:
    """Order numbers so that as many prefix sums as possible are multiples of `size`. counts: how often each number
    occurs; the numbers are from 1 to size - 1."""
    values = sorted(value for value, count in counts.items() if count)
    if prod(counts[value] + 1 for value in values) > EXACT_STATES:
        return [value for value in values for _ in range(counts[value])]

    @cache
    def best(left: tuple[int, ...]) -> tuple[int, int]:
        """The most multiples that can still follow when the counts `left` remain, and the index of the value to take first."""
        options = []
        for i, count in enumerate(left):
            if count:
                after = (*left[:i], count - 1, *left[i + 1 :])
                whole = sum(v * n for v, n in zip(values, after, strict=True)) % size == 0
                options.append((best(after)[0] + whole, -i))
        most, i = max(options, default=(0, 0))
        return most, -i

    left, order = tuple(counts[value] for value in values), []
    while any(left):
        _, i = best(left)
        order.append(values[i])
        left = (*left[:i], left[i] - 1, *left[i + 1 :])
    return order


def node_order(leaves: Sequence[str], sharding: Sharding) -> list[int]:
    """The order of the nodes in which to start ranks on them, for all three meshes.

    The innermost mesh over several nodes is placed first, because its collectives run most often, so that its groups span
    the fewest leaf switches. The groups of the outer meshes are then built from whole inner groups.
    """
    blocks = [[node] for node in range(len(leaves))]
    size = 1
    for mesh in (sharding.parameters, sharding.gradients, sharding.optimizer):
        if mesh.nodes > size:
            names = [_leaf(block, leaves) for block in blocks]
            step = mesh.nodes // size
            order = order_for_groups(names, step)
            blocks = [[node for i in order[k : k + step] for node in blocks[i]] for k in range(0, len(order), step)]
            size = mesh.nodes
    return [node for block in blocks for node in block]


def _leaf(block: list[int], leaves: Sequence[str]) -> str:
    """The leaf switch of most of a block's nodes."""
    return Counter(leaves[node] for node in block).most_common(1)[0][0]


def read_leaves(path: Path, nodes: int) -> tuple[list[str], list[str]]:
    """Read a file with a line `NODE LEAF` for each node: the nodes' names, and each one's leaf switch. Raises UserError
    if it cannot be read or does not have exactly `nodes` nodes."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"--leaves {path} cannot be read as text ({e}); give a file with a line NODE LEAF for each node"
        ) from None
    bad = next((number for number, words in enumerate(lines, 1) if len(words) != 2), None)
    if bad is not None:
        raise UserError(f"--leaves {path}, line {bad}: write the node's name, a space, and its leaf switch")
    names = [words[0] for words in lines]
    if len(set(names)) != len(names) or len(names) != nodes:
        raise UserError(
            f"--leaves {path} names {len(set(names))} nodes in {len(names)} lines; the plan needs {nodes}, each once"
        )
    return names, [words[1] for words in lines]

"""Ownership of KV-cache blocks: allocation, prefix reuse, eviction. Host-side bookkeeping, the same on every rank.

A block holds the keys and values of `block_size` consecutive tokens. A full block is identified by its tokens and the block
before it, and sequences with the same prefix share it. The root of a chain of blocks is -1, or another negative number if an adapter
has computed them, or such a number and a salt, for requests that share blocks with those of the same salt alone. A block without owners stays cached until its space is needed; the least recently used block is evicted first.
"""

from collections import OrderedDict
from collections.abc import Sequence

# (identity of the block before, or the root; this block's tokens): not a hash, so no collisions
Root = int | tuple[int, str]
Key = tuple[Root, tuple[int, ...]]


class BlockManager:
    """Which sequence owns which of `n_blocks` blocks of `block_size` tokens."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))  # least recently used first
        self.owners = [0] * n_blocks
        self.keys: list[Key | None] = [None] * n_blocks  # of blocks that `match` can find
        self.identities = [-1] * n_blocks  # of a block's contents: new with each allocation; blocks with equal keys share one
        self.known: dict[Key, int] = {}
        self._next_identity = 0

    @property
    def used(self) -> int:
        return self.n_blocks - len(self.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, tokens: Sequence[int], root: Root = -1) -> list[int]:
        """The cached blocks that `tokens` begins with, without the last token: its logits must be computed."""
        found: list[int] = []
        parent = root
        for first in range(0, len(tokens) - self.block_size, self.block_size):
            block = self.known.get((parent, tuple(tokens[first : first + self.block_size])))
            if block is None:
                break
            found.append(block)
            parent = self.identities[block]
        return found

    def forget(self, blocks: Sequence[int]) -> None:
        """Let `match` find none of these blocks."""
        for block in blocks:
            if (key := self.keys[block]) is not None:
                del self.known[key]
                self.keys[block] = None

    def can_take(self, cached: Sequence[int], fresh: int) -> bool:
        """Whether there is room for `acquire(cached)` and then `fresh` calls of `allocate`."""
        return fresh + self.unowned(cached) <= len(self.free)

    def unowned(self, cached: Sequence[int]) -> int:
        """How many cached blocks no sequence has."""
        return sum(self.owners[b] == 0 for b in cached)

    def owned_alone(self, blocks: Sequence[int], cached: Sequence[int]) -> int:
        """How many of a sequence's blocks would be free without it, except for some cached ones."""
        return sum(self.owners[b] == 1 and b not in cached for b in blocks)

    def acquire(self, cached: Sequence[int]) -> None:
        """Add an owner to cached blocks."""
        for block in cached:
            if self.owners[block] == 0:
                del self.free[block]
            self.owners[block] += 1

    def allocate(self) -> int:
        """A block with one owner; its cached contents are evicted. The caller must have checked `can_take`."""
        block, _ = self.free.popitem(last=False)
        self.forget([block])
        self.identities[block] = self._next_identity
        self._next_identity += 1
        self.owners[block] = 1
        return block

    def publish(self, blocks: Sequence[int], tokens: Sequence[int], first: int, last: int, root: Root = -1) -> None:
        """Let `match` find blocks first … last-1 of a sequence: they are full, with all keys and values in the cache."""
        for i in range(first, last):
            block = blocks[i]
            if self.keys[block] is None:
                parent = self.identities[blocks[i - 1]] if i else root
                key = (parent, tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
                if key in self.known:  # an equal block is published: share its identity, so that successors of both are found
                    self.identities[block] = self.identities[self.known[key]]
                else:
                    self.keys[block], self.known[key] = key, block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block. The last blocks of a sequence are evicted before its first ones."""
        for block in reversed(blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free[block] = None

    def give_back(self, blocks: list[int], keep: int) -> None:
        """Take the blocks after the first `keep` from a sequence, which owns them alone. They hold nothing of value, so they are
        allocated next, in the same order."""
        while len(blocks) > keep:
            block = blocks.pop()
            self.owners[block] = 0
            self.free[block] = None
            self.free.move_to_end(block, last=False)

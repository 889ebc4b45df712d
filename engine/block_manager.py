"""Which KV-cache block belongs to whom: allocation, prefix reuse, eviction. Host-side bookkeeping, the same on every rank.

A block holds the keys and values of `block_size` consecutive tokens. A full block is known by what it holds: its tokens and
the block before it. A sequence whose prompt begins alike shares it; when its last owner leaves, it stays until its space is
needed, and the longest unused goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int, tuple[int, ...]]  # (identity of the block before, or -1; this block's tokens): exact, so nothing collides


class BlockManager:
    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))  # longest unused first
        self.owners = [0] * n_blocks
        self.keys: list[Key | None] = [None] * n_blocks  # of full blocks whose content is in the cache
        self.identities = [-1] * n_blocks  # of what a block holds: changes with its content, and equal texts share one
        self.known: dict[Key, int] = {}
        self._next_identity = 0

    @property
    def used(self) -> int:
        return self.n_blocks - len(self.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The cached blocks that `tokens` begins with. At least one token is left over: its logits are wanted."""
        found: list[int] = []
        parent = -1
        for first in range(0, len(tokens) - self.block_size, self.block_size):
            block = self.known.get((parent, tuple(tokens[first : first + self.block_size])))
            if block is None:
                break
            found.append(block)
            parent = self.identities[block]
        return found

    def can_take(self, cached: Sequence[int], fresh: int) -> bool:
        """Whether `acquire(cached)` and then `fresh` new blocks are possible."""
        return fresh + sum(self.owners[b] == 0 for b in cached) <= len(self.free)

    def acquire(self, cached: Sequence[int]) -> None:
        """Become one more owner of cached blocks."""
        for block in cached:
            if self.owners[block] == 0:
                del self.free[block]
            self.owners[block] += 1

    def allocate(self) -> int:
        """A block of one's own; what was cached in it is forgotten. The caller has asked `can_take`."""
        block, _ = self.free.popitem(last=False)
        key = self.keys[block]
        if key is not None:
            del self.known[key]
            self.keys[block] = None
        self.identities[block] = self._next_identity
        self._next_identity += 1
        self.owners[block] = 1
        return block

    def publish(self, blocks: Sequence[int], tokens: Sequence[int], first: int, last: int) -> None:
        """Make blocks first … last-1 of a sequence findable: they are full and their keys and values are in the cache."""
        for i in range(first, last):
            block = blocks[i]
            if self.keys[block] is None:
                parent = self.identities[blocks[i - 1]] if i else -1
                key = (parent, tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
                if key in self.known:  # an equal block of another sequence: one is enough, and what follows either is found
                    self.identities[block] = self.identities[self.known[key]]
                else:
                    self.keys[block], self.known[key] = key, block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each. The end of a sequence becomes evictable before its beginning."""
        for block in reversed(blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free[block] = None

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with the block tables of all sequences. For tests."""
        owners = [0] * self.n_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a sequence has a block twice"
            for block in table:
                owners[block] += 1
        assert owners == self.owners, "owners are miscounted"
        assert set(self.free) == {b for b in range(self.n_blocks) if owners[b] == 0}, "a block is lost or free while owned"
        assert all(self.keys[b] == k for k, b in self.known.items()), "a known block holds something else"

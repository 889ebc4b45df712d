"""Whether the bookkeeping of KV-cache blocks is right."""

from collections.abc import Sequence

from engine.sequence import BlockManager


def check_blocks(manager: BlockManager, tables: Sequence[Sequence[int]]) -> None:
    """Raise AssertionError unless the manager agrees with the block tables of all sequences."""
    owners = [0] * manager.n_blocks
    for table in tables:
        assert len(set(table)) == len(table), "a sequence has a block twice"
        for block in table:
            owners[block] += 1
    assert owners == manager.owners, "owners are miscounted"
    assert set(manager.free) == {b for b, count in enumerate(owners) if not count}, "a block is lost or free while owned"
    assert all(manager.keys[b] == k for k, b in manager.known.items()), "a known block holds something else"

"""scripts/bench/serving/soak.py: what its clients count, and its verdict."""

from copy import deepcopy
from typing import Any

from scripts.bench.serving.soak import verdict

GOOD: dict[str, Any] = {
    "before": {"file_descriptors": 90, "memory_mb": 1400},
    "after": {"file_descriptors": 94, "memory_mb": 1500},
    "load": {"outcomes": {"complete": 12}},
    "dropped": {"cut off": 9, "complete": 1},
    "idle": {"running": 0, "waiting": 0, "kv_blocks_used": 0, "preemptions": 3},
}


def test_the_verdict() -> None:
    assert verdict(GOOD, 100) == []
    for path, bad, named in (
        (("idle", "kv_blocks_used"), 1, "idle"),
        (("load", "outcomes"), {"complete": 5, "cut off": 1}, "cut off"),
        (("dropped", "ReadError"), 1, "ReadError"),
        (("after", "file_descriptors"), 95, "from 90 to 95"),
        (("after", "memory_mb"), 1501, "from 1400 to 1501 MB"),
    ):
        result = deepcopy(GOOD)
        result[path[0]][path[1]] = bad
        (wrong,) = verdict(result, 100)
        assert named in wrong

"""scripts/bench/serving/stalls.py: what counts as a gap, and its table."""

import os
import random

import pytest

from errors import UserError
from scripts.bench.serving.stalls import COLUMNS, Watched, row
from scripts.lib.markdown import table


def test_the_largest_gap_counts_since_the_beginning(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    times = [random.uniform(0, 9) for _ in range(20)]
    clock = iter([0.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watched, spent = Watched([os.getpid()]), [0.0]
    monkeypatch.setattr(watched, "now", lambda: list(spent))
    watched.begin()
    now, busy = 3.0, list[float]()
    for seconds in times:
        now, spent[0] = now + seconds, spent[0] + (used := random.uniform(0, seconds))
        busy.append(used)
        watched.on_body(b"data", now)
    assert watched.gap == pytest.approx(max(times)) and watched.cpu == [pytest.approx(max(busy))]
    with pytest.raises(UserError, match="429"):
        watched.on_status(429)


def test_the_table_has_medians() -> None:
    one = row("half bodies", [(0.9, [0.8, 0.1]), (0.2, [0.7, 0.3]), (0.3, [0.1, 0.2])])
    assert one == {"case": "half bodies", "gap": 0.3, "frontend_cpu": 0.7, "rank_cpu": 0.2}
    assert table(COLUMNS, [one], "a caption").splitlines()[2] == "| half bodies | 0.30 | 0.70 | 0.20 |"

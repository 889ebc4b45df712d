"""scripts/bench/serving/fairness.py: when it begins to measure, and its table."""

import asyncio

import pytest

from errors import UserError
from scripts.bench.serving import fairness
from scripts.bench.serving.fairness import logged, row, table, until_there

LINE = "INFO path=/v1/completions status=200 client={client} prompt_tokens=64 ttft={ttft} finish=length"


def test_the_figures_of_a_row() -> None:
    """Medians of what the client, the log and the engine say; the warm-up and the other client do not count."""
    clients = [fairness.MEASURED] * 2 + [fairness.OTHER] + [fairness.MEASURED] * 4
    log = "\n".join(LINE.format(client=c, ttft=t) for c, t in zip(clients, (9, 9, 7, 0.01, 0.03, 0.1, 0.2), strict=True))
    assert logged(log) == [9, 9, 0.01, 0.03, 0.1, 0.2]
    found = {"alone": ([0.02, 0.04], [0.001]), "crowded": ([0.2, 0.4], [0.01, 0.03]), "unfinished_requests": 5}
    one = row(8, found, log, samples=2)
    assert one["client"] == {"alone": {"median": 30, "largest": 40}, "crowded": {"median": 300, "largest": 400}, "ratio": 10}
    assert one["server"]["alone"]["median"] == 20 and one["server"]["crowded"]["median"] == 150
    assert one["step"]["ratio"] == 20 and one["unfinished_requests"] == 5
    assert (
        table([one], "a caption").splitlines()[2] == "| 8 | 30.0 | 300.0 | 10.00 | 20.0 | 150.0 | 7.50 | 1.0 | 20.0 | 20.00 |"
    )


def test_it_waits_until_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only until one waits. What has ended counts as there, unless it is most."""
    monkeypatch.setattr(fairness, "STATS_SECONDS", 0.0)
    found, asked = [(0, 0), (2, 1), (8, 3), (8, 91), (8, 200)], list[int]()

    async def stats() -> dict[str, int]:
        running, waiting = found[len(asked)]
        asked.append(running + waiting)
        return {"running": running, "waiting": waiting}

    asyncio.run(until_there(stats, 100, lambda: len(asked) // 4))
    assert asked == [0, 3, 11, 99]
    asked.clear()
    with pytest.raises(UserError, match="give more --other-tokens"):
        asyncio.run(until_there(stats, 100, lambda: 51))

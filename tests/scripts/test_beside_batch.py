"""scripts.bench.serving.beside_batch: what runs beside the streams that it measures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from errors import UserError
from scripts.bench.serving import beside_batch
from scripts.bench.serving.beside_batch import CASES, REQUESTS, measure
from server.limits import LOWEST
from tests.support.server_thread import Site, wait_for


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(beside_batch, "TOKENS", 8)
    site = Site(tmp_path, journal=str(tmp_path / "journal"), max_num_seqs=4).start()
    site.engine.reply = lambda submit: [50] * submit.params.max_tokens
    site.engine.delay = 0.002  # else tokens come together, and their gaps are 0
    yield site
    site.close()


def test_cases_take_turns_beside_nothing_a_batch_and_streams(site: Site, seed: int) -> None:
    rows = measure(site.url, 2, 2, 1000)
    assert [row["case"] for row in rows] == list(CASES) and rows[0]["ratio"] == 1
    assert all(row["gap"] <= row["slow"] and row["first"] > 0 for row in rows)
    kinds = [one.turn.priority for one in site.engine.submits]
    changes = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    assert kinds.count(0) == 2 * REQUESTS * (2 + 2 + 4) and kinds[0] == kinds[-1] == 0 and changes.count(LOWEST) >= 2
    batches = [one.value for one in site.server.batches.store.records.values() if one.value["object"] == "batch"]
    assert [one["status"] for one in batches] == ["cancelled"] * 2 and all(
        one["request_counts"]["completed"] for one in batches
    )


@pytest.mark.parametrize("lines", [3, 400])
def test_a_batch_that_ends_before_the_streams_counts_for_nothing(
    lines: int, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_batch, "LINES", lines)
    site.engine.delay = 0
    with pytest.raises(UserError, match=r"^the batch is completed and not in_progress"), beside_batch.batch(site.url, 1000):
        wait_for(lambda: site.openai.batches.list().data[0].status == "completed")


def test_a_stream_that_fails_ends_it(site: Site) -> None:
    with pytest.raises(UserError, match=r"^8 requests failed: status 400$"):
        measure(site.url, 2, 1, 10**6)

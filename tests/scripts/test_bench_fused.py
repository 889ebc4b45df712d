"""scripts/bench/comm/fused: the paper's efficiency, the tables, and the whole command on CPU ranks."""

import json
import random
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.ranks import Ranks
from tp import World

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

from scripts.bench.comm.fused.tables import Row, by_shape, markdown


def test_efficiency(seed: int) -> None:
    """0 if no communication is hidden, 1 if all is, below 0 if slower than unfused (Flux, equation 2)."""
    gemm, exposed = random.uniform(1, 100), random.uniform(1, 100)

    def efficiency(overall: float) -> float | None:
        return Row("wo", True, 64, 8, 8, "spans", overall, gemm, gemm + exposed).efficiency

    assert efficiency(gemm + exposed) == 0, f"seed {seed}"
    assert efficiency(gemm) == 1, f"seed {seed}"
    assert efficiency(gemm + exposed / 4) == pytest.approx(0.75), f"seed {seed}"
    assert efficiency(gemm + 3 * exposed) == pytest.approx(-2), f"seed {seed}"
    assert Row("wo", True, 64, 8, 8, "spans", gemm, gemm, gemm).efficiency is None


def run_command(world: World, *arguments: str) -> None:
    """The command on ranks that have joined."""
    from scripts.bench.comm.fused import __main__ as command

    with patch.object(command, "join_ranks", lambda device: world), patch("sys.argv", ["fused", *arguments]):
        command.main()


def test_on_two_cpu_ranks(interpreters: Ranks, tmp_path: Path) -> None:
    interpreters.run(2, run_command, "--device", "cpu", "--rows", "8", "--replays", "2", "--out", str(tmp_path))
    report = json.loads((tmp_path / "gemm-overlap.json").read_text())
    assert report["errors"] == {}
    assert report["replays"] == 2
    found = {(row["layer"], row["way"]) for row in report["rows"]}
    both, gathers = ("unfused", "spans", "owners"), ("spans-pull", "owners-pull")
    assert found == {("tiny down", way) for way in both} | {("tiny up", way) for way in (*both, *gathers)}
    rows = [Row(*(row[name] for name in Row.__dataclass_fields__)) for row in report["rows"]]
    assert len(by_shape(rows)) == 2
    assert (tmp_path / "gemm-overlap.md").read_text().startswith(markdown(rows, "")[:20])


def test_a_table_for_each_end(seed: int) -> None:
    """All-gathers and reduce-scatters have separate tables, and every time is in the column of its algorithm."""
    times = {(scatter, way): random.randrange(100, 999) for scatter in (True, False) for way in ("unfused", "tiles0")}
    times[False, "tiles0-pull/4"] = random.randrange(100, 999)
    rows = [Row("w", scatter, 64, 8, 16, way, float(t), 50.0, 1000.0) for (scatter, way), t in times.items()]
    _, gathers, scatters = (part.splitlines() for part in markdown(rows, "here").split("\n\n"))
    cells = [[line.strip("| ").split(" | ") for line in (table[0], table[2])] for table in (gathers, scatters)]
    assert cells[0][0] == ["all-gather + GEMM", "n", "k", "m", "GEMM", "unfused", "tiles0", "tiles0-pull/4"]
    assert cells[1][0] == ["GEMM + reduce-scatter", "n", "k", "m", "GEMM", "unfused", "tiles0"]
    for scatter, (head, line) in zip((False, True), cells, strict=True):
        assert line[:5] == ["w", "8", "16", "64", "50.0"]
        for way, cell in zip(head[5:], line[5:], strict=True):
            assert cell.startswith(f"{times[scatter, way]}.0"), f"seed {seed}: {way} {cell}"

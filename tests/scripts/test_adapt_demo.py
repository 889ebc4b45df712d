"""The demo of adaptation: a second command measures nothing again, and takes no model for one of other settings."""

import sys
from pathlib import Path

import pytest

from errors import UserError
from scripts.quality import adapt_demo


@pytest.mark.usefixtures("forked_commands")
def test_a_second_command_goes_on_and_another_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(adapt_demo, "SEQUENCE", 32)
    monkeypatch.setattr(adapt_demo, "BATCH", 2)
    estimate, estimates = adapt_demo.duration, list[float]()
    monkeypatch.setattr(adapt_demo, "duration", lambda *args: estimates.append(estimate(*args)) or estimates[-1])
    line = ["adapt_demo", "--out", str(tmp_path), "--dry-run", "--ladder-layers", "4", "--ranks", "1", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", [*line, "--items", "2"])
    adapt_demo.main()
    first = capfd.readouterr()
    assert "4 ladder layers, retrained" in first.out and f"about {estimates[0] / 60:.1f} min\n" in first.err
    assert estimates[0] > 0
    rows = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    assert len(rows) == 3  # the original, the converted and the retrained one
    adapt_demo.main()
    second = capfd.readouterr()
    assert second.out == first.out and "about 0.0 min" in second.err and estimates[1] == 0
    assert rows == {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    kept = adapt_demo.measured(args := adapt_demo.parse_args(), args.model)
    assert kept in rows
    with monkeypatch.context() as patch:
        patch.setattr(adapt_demo, "code_digest", lambda: "other")
        assert not adapt_demo.measured(args, args.model).exists()
    for more in (["--learning-rate", "1e-4"], ["--distill", "0.25"]):
        monkeypatch.setattr(sys, "argv", [*line, "--items", "2", *more])
        with pytest.raises(UserError, match="failed"):
            adapt_demo.main()
        shown = capfd.readouterr()
        assert f"another {more[0].removeprefix('--').replace('-', ' ')}" in shown.err and not shown.out

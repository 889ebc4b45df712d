"""The exit code of tests.routers, whose table also has stored results. No router runs here."""

import json
import sys
from pathlib import Path

import pytest

from errors import UserError
from tests.routers import __main__ as program


def result(ok: bool) -> dict[str, object]:
    return {"version": "1", "rows": [{"check": "drain", "ok": ok, "detail": "why"}]}


@pytest.mark.parametrize("passes", [True, False])
def test_only_checks_of_this_call_count(passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"vllm_router": result(False), "sglang_router": result(not passes)}
    (tmp_path / "routers.json").write_text(json.dumps(stored))
    for name in ("ROOT", "OUT", "RESULTS"):
        monkeypatch.setattr(program, name, tmp_path)
    monkeypatch.setattr(program, "results_folder", lambda _: tmp_path)
    monkeypatch.setattr(program, "install", lambda *_: tmp_path)
    monkeypatch.setattr(program, "attempt", lambda *_: (result(passes)["rows"], []))
    monkeypatch.setattr(sys, "argv", ["routers", "--only", "sglang_router"])
    if passes:
        program.main()
    else:
        with pytest.raises(UserError, match=r"^1 checks failed"):
            program.main()
    assert "vllm-router, drain: why" in (tmp_path / "routers.md").read_text()

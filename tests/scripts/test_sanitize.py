"""`make sanitize`: which tests it selects, and what it writes of compute-sanitizer's output."""

import sys
from pathlib import Path

import pytest
import torch

from errors import UserError
from scripts import sanitize
from scripts.lib.steps import Step

TOOL = f"""#!{sys.executable}
import subprocess, sys
print("========= COMPUTE-SANITIZER")
code = subprocess.call(sys.argv[1:])
if code == 7:
    print("========= Invalid __global__ read of size 4 bytes")
    print("=========     at _norm+0x10")
    print("========= Invalid __global__ read of size 4 bytes")
print(f"========= ERROR SUMMARY: {{2 if code else 0}} errors")
sys.exit(9 if code else 0)
"""


def start(monkeypatch: pytest.MonkeyPatch, found: list[Step], *argv: object) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "steps", lambda _: found)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *map(str, argv)])
    sanitize.main()


def test_the_summary_has_what_the_tool_and_pytest_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tool := tmp_path / "tool").write_text(TOOL)
    tool.chmod(0o755)

    def step(name: str, code: str) -> Step:
        return Step(name, 60, (str(tool), sys.executable, "-c", code))

    good = step("good", "print('..'); print('2 passed, 14 deselected in 3.28s'); print('2 passed by')")
    flags = ("--raw", tmp_path, "--compute-sanitizer", tool)
    with pytest.raises(UserError, match="did not end well"):
        start(monkeypatch, [good, step("bad", "raise SystemExit(7)")], *flags, "--only", "good", "bad")
    start(monkeypatch, [good, step("bad", ""), step("later", "")], *flags, "--only", "good")
    lines = (tmp_path / "sanitizer.txt").read_text().splitlines()
    assert lines[:8] == [
        "== good: exit code 0",
        "      1 2 passed, 14 deselected in 3.28s",
        "      1 ========= ERROR SUMMARY: 0 errors",
        "== bad: failed or stopped",
        "      2 ========= Invalid __global__ read of size 4 bytes",
        "      1 ========= ERROR SUMMARY: 2 errors",
        "== later: not run",
        "",
    ]
    assert lines[8].startswith("Made on ")

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.process_tree import process_tree


def test_a_thread_that_ends_meanwhile_hides_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob

    def with_ended_one(folder: Path, pattern: str) -> Iterator[Path]:
        yield folder / "0" / "children"
        yield from glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", with_ended_one)
    with subprocess.Popen(["sleep", "60"]) as child:
        tree = process_tree(os.getpid())
        child.kill()
    assert tree[0] == os.getpid() and child.pid in tree

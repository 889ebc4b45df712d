"""The check of the packages' order finds each kind of fault."""

import subprocess
from pathlib import Path

import pytest

from scripts.report.check_structure import faults, imports

GOOD = {
    "errors.py": "",
    "kernels/linear.py": "import errors\n",
    "comm/quantize.py": "from kernels import linear\nif True:\n    from comm import other\n",
    "comm/other.py": "def f():\n    import comm.third\n",
    "comm/third.py": "import os\n",
    "tests/test_any.py": "import comm.quantize\n",
}


def found_in(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run("git init -q && git add -A", cwd=folder, shell=True, check=True)
    return list(faults(imports(folder)))


def test_nothing_is_found_where_all_is_well(tmp_path: Path) -> None:
    assert found_in(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("kernels/linear.py", "import comm.other\n", ["kernels.linear, line 1: kernels imports comm, which comes after it"]),
        (
            "comm/third.py",
            "def f():\n    from kernels.linear import x\n",
            ["comm.third, line 2: imports kernels.linear inside"],
        ),
        ("comm/third.py", "class A:\n    async def f(self):\n        import errors\n", ["comm.third, line 3: imports errors"]),
        ("comm/third.py", "from comm import quantize\n", ["import each other", "comm.third"]),
        ("other/new.py", "import errors\n", ["other has no place in ORDER"]),
    ],
)
def test_a_fault_is_named(file: str, text: str, words: list[str], tmp_path: Path) -> None:
    [fault] = found_in(tmp_path, GOOD | {file: text})
    assert all(word in fault for word in words)

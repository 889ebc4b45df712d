"""The check of the packages' order finds each kind of fault."""

import subprocess
from pathlib import Path

import pytest

from scripts.report.check_structure import faults, imports
from tests import ROOT

GOOD = {
    "errors.py": "",
    "kernels/linear.py": "import errors\n",
    "comms/quantize.py": "from kernels import linear\nif True:\n    from comms import other\n",
    "comms/other.py": "def f():\n    import comms.third\n",
    "comms/third.py": "import os\n",
    "tests/test_any.py": "import comms.quantize\n",
}


def found_in(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run("git init -q && git add -A", cwd=folder, shell=True, check=True)
    return list(faults(imports(folder)))


def test_no_module_has_the_name_of_one_that_a_notebook_has_imported() -> None:
    """Jupyter's kernel imports these before a cell can import ours, which then would be theirs."""
    theirs = {"IPython", "comm", "debugpy", "decorator", "jedi", "packaging", "parso", "psutil", "tornado", "traitlets", "zmq"}
    ours = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {"engine", "comms", "tp"} <= ours and not ours & theirs


def test_nothing_is_found_where_all_is_well(tmp_path: Path) -> None:
    assert found_in(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("kernels/linear.py", "import comms.other\n", ["kernels.linear, line 1: kernels imports comms, which comes after it"]),
        (
            "comms/third.py",
            "def f():\n    from kernels.linear import x\n",
            ["comms.third, line 2: imports kernels.linear inside"],
        ),
        (
            "comms/third.py",
            "class A:\n    async def f(self):\n        import errors\n",
            ["comms.third, line 3: imports errors"],
        ),
        ("comms/third.py", "from comms import quantize\n", ["import each other", "comms.third"]),
        ("other/new.py", "import errors\n", ["other has no place in ORDER"]),
    ],
)
def test_a_fault_is_named(file: str, text: str, words: list[str], tmp_path: Path) -> None:
    [fault] = found_in(tmp_path, GOOD | {file: text})
    assert all(word in fault for word in words)

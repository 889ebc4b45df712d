"""Check that the packages keep their order and their size: imports lead one way, no modules import each other, no import is hidden,
and no part of the repository is larger than its budget (`scripts/report/budgets.py`).

    python -m scripts.report.check_structure     # names each fault; exit code 2 if there is one

A name in ORDER is a package, or a module of the root. It imports only names before it. An import inside a function may only be of the
same package, or is listed in LATE with its reason.
"""

import ast
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from cli import Parser, run
from errors import UserError
from scripts.report.budgets import over_budget

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    "errors", "files", "kernels", "ranks", "quantized", "comms", "cli", "config", "options", "tp", "layers", "model",
    "checkpoints", "text", "engine", "launch", "server", "generate", "training", "deploy", "scripts",
)  # fmt: skip
NO_TRITON = "a CPU machine may lack Triton"
LATE = {
    ("checkpoints.hub", "ranks.hosts"): "it needs torch, for which nobody waits on one host",
    ("comms.quantize", "kernels.quantize"): NO_TRITON,
    ("comms.relay", "kernels.relay"): NO_TRITON,
    ("engine.schedules", "comms.workspace"): NO_TRITON,
    ("generate", "launch"): "the ranks do not need torch's agent",
    ("generate", "server.examples"): "only the terminal needs it",
    ("generate", "text.console"): "only the terminal needs its library",
}


class Import(NamedTuple):
    """late: it is inside a function."""

    module: str
    imported: str
    line: int
    late: bool


def imports(root: Path) -> list[Import]:
    """All imports of the repository's own modules, tests left out."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    known = {path[:-3].replace("/", ".").removesuffix(".__init__"): root / path for path in listed if path[:6] != "tests/"}
    return [found for module, path in known.items() for found in _of_module(module, ast.parse(path.read_text()), set(known))]


def _of_module(module: str, tree: ast.AST, known: set[str], late: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [name if (name := f"{node.module}.{one}") in known else str(node.module) for one in names]
            yield from (Import(module, name, node.lineno, late) for name in names if name in known and name != module)
        yield from _of_module(module, node, known, late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def faults(found: list[Import]) -> Iterator[str]:
    """What is wrong, a sentence for each fault."""
    for module, imported, line, late in found:
        own, other = (name.partition(".")[0] for name in (module, imported))
        if own == other:
            continue
        if unknown := [name for name in (own, other) if name not in ORDER]:
            yield f"{unknown[0]} has no place in ORDER"
        elif ORDER.index(other) > ORDER.index(own):
            yield f"{module}, line {line}: {own} imports {other}, which comes after it"
        if late and (module, imported) not in LATE:
            yield f"{module}, line {line}: imports {imported} inside a function"
    graph: dict[str, set[str]] = {}
    for module, imported, _, _ in found:
        graph.setdefault(module, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        yield f"these modules import each other: {' <- '.join(e.args[1])}"


def main() -> None:
    Parser(description=__doc__).parse_args()
    if found := dict.fromkeys([*faults(imports(ROOT)), *over_budget(ROOT)]):
        raise UserError("; ".join(found))


if __name__ == "__main__":
    run(main)

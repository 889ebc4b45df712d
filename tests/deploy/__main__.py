"""Run the tests of replicas on a local Ray, and write what became of the clients' requests.

    python -m tests.deploy            # out/ray-serve.md has the table
    python -m tests.deploy --write    # into docs/results, which docs/replicas.md quotes

Needs .venv-ray, which `make cluster-test` makes. Arguments after -- are pytest's. Exits with pytest's code if a test failed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cli import Parser, run
from errors import UserError
from scripts.lib.markdown import table_lines
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from tests.deploy.test_ray_serve import COUNTS, KINDS, PYTHON


def table(rows: list[dict[str, Any]]) -> str:
    return (
        "\n".join(table_lines(["under load", *KINDS], ([row["event"], *(row[kind] for kind in KINDS)] for row in rows))) + "\n"
    )


def main() -> None:
    parser = Parser(description=__doc__)
    add_write_option(parser)
    parser.add_argument("pytest", nargs="*", metavar="-- ARGS", help="arguments of pytest")
    args = parser.parse_args()
    folder = results_folder(args)
    if not PYTHON.exists():
        raise UserError("there is no .venv-ray; run make cluster-test")
    with tempfile.TemporaryDirectory() as empty:
        counts = Path(empty, "counts.jsonl")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "exhaustive", "tests/deploy", *args.pytest]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | {COUNTS: str(counts)}).returncode
        if code:
            sys.exit(code)
        rows = [json.loads(line) for line in counts.read_text().splitlines()]
    version = (
        next((PYTHON.parent.parent / "lib").glob("*/site-packages/ray-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    )
    write_table("ray-serve", {"ray": version, "rows": rows}, table(rows), folder)


if __name__ == "__main__":
    run(main)

"""Let the quantization tools of others write checkpoints, and compare Rung's logits with those of the tools.

    python -m tests.quantizers            # out/quantizers.md has the table
    python -m tests.quantizers --write    # into docs/results, which docs/checkpoints.md names

Each tool writes a random Llama of 2 layers in its formats, on a CPU, and computes fp32 logits of the dequantized weights; if it can
round activations on a CPU, also with that. Rung reads each file on 1 and on 2 CPU ranks in fp32. An error is the norm of the
difference divided by the norm of the tool's logits. Without rounding it must be at most 1e-5. With rounding, a value in the middle
of two codes may get the other one, which the tokens after it see; so on one rank at least one token must be within 1e-5. A format
that the tool's script lists as refused must be refused with one line.

The tools are installed from PyPI into two environments in ~/.cache/rung/quantizers (RUNG_CACHE: another folder). Checkpoints in
out/quantizers are kept, so a second call only reads them; they are written again if a tool's script or versions change. Exits with
2 if an error is too large or a tool fails; logs are in out/quantizers. Needs a network for the first call, and a C++ compiler.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from cli import Parser, note, run
from errors import UserError
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import cell, table_lines
from scripts.lib.results import OUT, ROOT, add_write_option, results_folder, write_table
from tests.quantizers.reading import REFERENCE, read
from tests.support.environments import digest, install
from tests.support.ranks import Ranks

HERE, KEPT = Path(__file__).parent, OUT / "quantizers"
TOOLS = {  # its environment, and its packages
    "llmcompressor": ("general", ("llmcompressor", "compressed-tensors")),
    "modelopt": ("general", ("nvidia-modelopt",)),
    "transformers": ("general", ("transformers",)),
    "gptqmodel": ("gptqmodel", ("gptqmodel",)),  # it needs a newer torch
}
BOUND = 1e-5
TOOL_SECONDS = 1800
ENVIRONMENT = dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1", TORCHDYNAMO_DISABLE="1")
ENVIRONMENT["GPTQMODEL_CPU_WORKERS"] = "2"  # it fails with one

Row = dict[str, Any]  # format; one, two: errors on 1 and 2 ranks, or why it is refused; problem: "" if there is none


def write_checkpoints(tool: str) -> str:
    """Write those formats of a tool that are not in out/quantizers. Returns what failed, or ""."""
    source, script, folder = requirements(tool), HERE / f"write_{tool}.py", KEPT / tool
    state, mark = digest([source, script, HERE / "writing.py"]), folder / ".state"
    if not mark.exists() or mark.read_text() != state:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text(state)
    note(f"{tool}: installing and writing checkpoints, log in {(KEPT / tool).relative_to(ROOT)}.log")
    python = install("quantizers", source.stem, source) / "venv" / "bin" / "python"
    command, environment = [python, script, folder, ROOT / "models" / "tiny-standard"], {**os.environ, **ENVIRONMENT}
    with (KEPT / f"{tool}.log").open("w") as log:
        try:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=TOOL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{tool}: did not end within {TOOL_SECONDS} s"
    return f"{tool}: exit status {done.returncode}; see {log.name}" if done.returncode else ""


def requirements(tool: str) -> Path:
    return HERE / f"{TOOLS[tool][0]}.txt"


def version(tool: str) -> str:
    pins = dict(line.split("==") for line in requirements(tool).read_text().split())
    return ", ".join(f"{package} {pins[package]}" for package in TOOLS[tool][1])


def compare(tool: str, ranks: Ranks) -> list[Row]:
    folders = [path for path in (KEPT / tool).iterdir() if not path.name.startswith(".") and (path / "config.json").exists()]
    folders.sort(key=lambda path: (not (path / REFERENCE).exists(), path.name))
    (one, *_), (two, *_) = ranks.run(1, read, folders), ranks.run(2, read, folders)
    rows = []
    for folder, *found in zip(folders, one, two, strict=True):
        row = {"format": folder.name, "one": found[0], "two": found[1]}
        rows.append({**row, "problem": problem(*found, refuse=not (folder / REFERENCE).exists())})
        note(f"{tool}, {folder.name}: {rows[-1]['problem'] or 'as expected'}: {found[0]}")
    return rows


def problem(one: dict[str, float] | str, two: dict[str, float] | str, refuse: bool) -> str:
    """What is wrong with the errors on 1 and 2 ranks, or ""."""
    if isinstance(one, str) or isinstance(two, str):
        return "" if refuse and one == two else "refused"
    if refuse:
        return "read, but its script lists it as refused"
    checked = [one["dense"], two["dense"], one.get("closest", 0.0)]
    return "" if all(error <= BOUND for error in checked) else f"an error above {BOUND:g}"


def table(results: dict[str, Any], where: str) -> str:
    read, refused = [], []
    for result in results.values():
        for row in result["rows"]:
            start, one, two = [result["version"], row["format"]], row["one"], row["two"]
            if isinstance(one, str) or isinstance(two, str):
                refused.append([*start, one if isinstance(one, str) else two])
            else:
                pairs = ((one, "dense"), (two, "dense"), (one, "closest"), (one, "rounded"), (two, "rounded"))
                read.append([*start, *(cell(errors.get(kind), ".1g") for errors, kind in pairs)])
    head = ["tool", "format", "1 rank", "2 ranks", "rounded, 1 rank, closest token", "rounded, 1 rank", "rounded, 2 ranks"]
    text = f"""
Errors of the logits: norm of the difference divided by the norm of the tool's logits, in fp32. The first two are of the dequantized
weights, the others with activations rounded as the file says, where the tool can do so on a CPU. There, a value in the middle of two
codes may get the other one, which later tokens see: the closest token tells whether the rounding is the same. With 2 ranks, each
rounds its part of some inputs by its own largest value. Made on {where}.

Refused by design, with this line:
"""
    return "\n".join([*table_lines(head, read), text, *table_lines(["tool", "format", "line"], refused)]) + "\n"


def main() -> None:
    parser = Parser(description=__doc__)
    add_write_option(parser)
    args = parser.parse_args()
    folder, ranks, results, failures = results_folder(args), Ranks(2), dict[str, Any](), []
    try:
        for tool in TOOLS:
            failures += filter(None, [write_checkpoints(tool)])
            results[tool] = {"version": version(tool), "rows": compare(tool, ranks)}
            failures += [f"{tool}, {row['format']}: {row['problem']}" for row in results[tool]["rows"] if row["problem"]]
    finally:
        ranks.close()
    about = machine()
    write_table("quantizers", {"machine": about, "tools": results}, table(results, describe(about, "cpu")), folder)
    if failures:
        raise UserError("; ".join(failures))


if __name__ == "__main__":
    run(main)

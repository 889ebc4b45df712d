"""What every measuring script shares: where results go, and on which machine they were made."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
MADE_FROM = "made-from.json"  # in RESULTS: by table or plot, a digest of itself and of each raw file it was made from


def machine() -> dict[str, Any]:
    """The hardware and software that a figure depends on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpus": f"{len(gpus)} x {gpus[0]}" if gpus else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def describe(machine: dict[str, Any], device: str) -> str:
    """One line for a table's caption; device: `cpu` or `cuda`, whichever did the work."""
    cpu = f"{machine['cores']} cores of {machine['cpu']}"
    return f"{machine['gpus'] if device == 'cuda' else cpu}, torch {machine['torch']}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_json(name: str, content: Any) -> Path:
    """Write `docs/results/NAME.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def made(path: Path, *raw: Path) -> None:
    """Note that the table or plot at `path` was just made from the files `raw`. Outside of docs/results nothing is noted."""
    if not path.is_relative_to(RESULTS):
        return
    notes = RESULTS / MADE_FROM
    known = json.loads(notes.read_text()) if notes.exists() else {}
    sources = {str(one.relative_to(RESULTS)): _digest(one) for one in raw}
    known[str(path.relative_to(RESULTS))] = {"digest": _digest(path), "from": sources}
    notes.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def stale(folder: Path) -> Iterable[str]:
    """A line for each table and plot of `folder` that is not what its raw files gave: `made` was not called since a change."""
    known = json.loads((folder / MADE_FROM).read_text())
    shown = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in (".md", ".png", ".svg")}
    for name in sorted(shown | known.keys()):
        if name not in known:
            yield f"{name}: nothing says what it was made from"
        elif not (folder / name).exists():
            yield f"{name}: {MADE_FROM} names it, but it is gone"
        elif _digest(folder / name) != known[name]["digest"]:
            yield f"{name}: was changed by hand, or its writer did not note it"
        else:
            for raw, digest in known[name]["from"].items():
                if not (folder / raw).exists() or _digest(folder / raw) != digest:
                    yield f"{name}: older than {raw}; run the make target that writes it"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]

"""What every measuring script shares: where results go, and on which machine they were made."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


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

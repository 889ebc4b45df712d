"""A description of the machine, for results and captions."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


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


def describe(machine: dict[str, Any], device: str | None = None) -> str:
    """One line for a table's caption. device: `cpu` or `cuda`, the device that was measured; None: the GPUs if there are any."""
    on_cpu = machine["gpus"] == "none" if device is None else device != "cuda"
    measured = f"{machine['cores']} cores of {machine['cpu']}" if on_cpu else machine["gpus"]
    return f"{measured}, torch {machine['torch']}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

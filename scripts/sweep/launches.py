"""Run the configurations of a sweep: start ranks, read the results that they print, and append them to the sweep's file."""

import json
import os
import platform
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch

from errors import UserError
from files import writing
from ranks.processes import on_ranks
from scripts.lib.experiment import whole_lines
from scripts.lib.machine import machine
from scripts.lib.process_tree import end
from scripts.lib.results import ROOT, check_output
from scripts.lib.vllm_model import MEMORY, write_model
from scripts.sweep.rows import VLLM, Row, Setting, interconnect, read_rows, row_line
from scripts.sweep.worker import MARK

STOPPED = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:[\w.]*(?:Error|Exception)|error): .*)")  # torch names the rank of a traceback
LONGEST = 300  # characters


@dataclass(frozen=True)
class Start:
    """How one launch starts its ranks. All settings of a launch share these values."""

    ranks: int
    hosts: int
    device: str
    environment: tuple[tuple[str, str], ...]
    vllm: str = ""  # the model that vLLM measures (one per launch); empty: Rung is measured
    vllm_python: str = ""  # the Python of the environment with vLLM
    vllm_memory: float = MEMORY  # the share of a GPU's that it may use
    vllm_seed: int = 0  # of its engine
    deterministic: bool = False

    def command(self, job: Path) -> list[str]:
        """The command that measures the settings in the file `job`. For vLLM, the model's config.json is in the same folder."""
        if self.vllm:
            script = str(Path(__file__).with_name("vllm_worker.py"))
            return [self.vllm_python, script, str(job), str(job.parent), str(self.vllm_memory)]
        return [*on_ranks(self.ranks), "-m", "scripts.sweep.worker", str(job)]


def by_launch(
    settings: Iterable[Setting], vllm_python: str = "", vllm_memory: float = MEMORY
) -> Iterator[tuple[Start, list[Setting]]]:
    """Group the settings into launches: pairs of a `Start` and the settings that it measures."""

    def start(s: Setting) -> Start:
        between = interconnect(s.interconnect)
        environment = tuple(sorted(between.environment.items()))
        if s.variant == VLLM:
            return Start(s.tp, between.hosts, s.device, environment, s.model, vllm_python, vllm_memory, s.seed)
        return Start(s.tp, between.hosts, s.device, environment, deterministic=s.deterministic)

    for found, same in groupby(sorted(settings, key=lambda s: astuple(start(s))), key=start):
        yield found, list(same)


def versions() -> dict[str, str]:
    """Versions of the software, and the environment variables that influence a measurement."""
    revision = ["git", "describe", "--always", "--dirty"]
    try:
        git = subprocess.run(revision, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # a machine without git
        git = ""
    found = {"rung": git or "unknown", "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    steering = ("NCCL_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return found | {name: value for name, value in sorted(os.environ.items()) if name.startswith(steering)}


class RowsFile:
    """The sweep's JSON-lines file: its existing rows, and appending new ones."""

    def __init__(self, path: Path) -> None:
        self.path, self.machine, self.versions = path, machine(), versions()
        check_output(path)
        self.rows = read_rows(path) if whole_lines(path) else []
        if any(row.machine != self.machine for row in self.rows):
            raise UserError(f"{path} was made on another machine or torch; name another file with --out")

    def add(self, setting: Setting, **found: Any) -> None:
        row = Row(setting, self.machine, self.versions, **found)
        self.rows.append(row)
        with writing(self.path), self.path.open("a") as file:
            file.write(row_line(row))

    def is_done(self, setting: Setting, retry: bool) -> bool:
        return any(row.setting == setting and not (row.error and retry) for row in self.rows)


def launch(
    command: Sequence[str], environment: dict[str, str], timeout: float, heard: Callable[[dict[str, Any]], None]
) -> str | None:
    """Run `command`, pass each marked line of its stdout to `heard`, and end it after `timeout` seconds without such a line.

    Returns None if it succeeded, else an error message: the timeout, or the exit code and the `reason` from stderr.
    """
    lines = queue.SimpleQueue[str | None]()  # None at the end
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        # in a thread, because what the command leaves behind may keep the pipe open
        threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True).start()
        try:
            deadline = time.monotonic() + timeout
            while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if line.startswith(MARK):
                    heard(json.loads(line[len(MARK) :]))
                    deadline = time.monotonic() + timeout
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except (queue.Empty, subprocess.TimeoutExpired):
            if not (failed := process.poll()):
                return f"nothing happened for {timeout:.0f} s"
            code = failed
        finally:
            end(process)
        errors.seek(0)
        return None if code == 0 else f"exit code {code}: {reason(errors.read())}"


def reason(output: str) -> str:
    """The line of a launch's output that best explains its failure: a rank's own error rather than the launcher's report."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [match[1] for match in map(STOPPED.match, lines) if match]
    own = [line for line in found if "ChildFailedError" not in line]
    memory = [line for line in own if "OutOfMemoryError" in line or "out of memory" in line]
    first = [*memory, *own, *found, *lines[-1:], "no output"][0]
    return first if len(first) <= LONGEST else first[: LONGEST - 3] + "..."


def read_lines(file: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    with file:
        for line in file:
            lines.put(line)
    lines.put(None)


def one_launch(
    file: RowsFile, start: Start, todo: list[Setting], timeout: float, bar: Any
) -> tuple[Setting | None, str | None]:
    """Start the ranks on the settings in `todo`. Each result is written to the file and its setting removed from `todo`.

    Returns the setting that was begun last, and the error with which the ranks ended (None if there was none).
    """
    current: Setting | None = None

    def heard(event: dict[str, Any]) -> None:
        nonlocal current
        kind = next(iter(event))
        setting = Setting(**event.pop(kind))
        if kind == "begin":
            current = setting
            bar.set_postfix_str(setting.label)
        elif setting in todo:
            todo.remove(setting)
            file.add(setting, **event)
            bar.update()

    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "settings.json"
        job.write_text(json.dumps([json.loads(s.key) for s in todo]))
        if start.vllm:
            write_model(Path(folder), start.vllm, start.ranks, todo[0].quantize)
        error = launch(start.command(job), dict(start.environment), timeout, heard)
    if error is None and todo:
        error = "the ranks ended without a result"
    return current, error


def run_all(file: RowsFile, start: Start, todo: list[Setting], timeout: float, bar: Any) -> None:
    """Launch ranks until each setting has a row.

    After a crash, the setting that was running gets the error and the others are launched again. If the ranks crash before any
    setting began, all settings get the error.
    """
    while todo:
        before = len(todo)
        current, error = one_launch(file, start, todo, timeout, bar)
        if error is None:
            return
        blamed = [current] if current is not None and current in todo else []
        if not blamed and len(todo) == before:
            blamed = list(todo)
        for setting in blamed:
            todo.remove(setting)
            file.add(setting, error=error)
            bar.update()

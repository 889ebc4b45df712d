"""Clients that are commands, not libraries: each runs once, in a HOME of its own, and its exit status and output decide."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from features import report


def attempt(
    api: str, name: str, command: Sequence[str], files: dict[str, str], wanted: str = "", seconds: float = 500, **environ: str
) -> None:
    """Run `command` in an empty folder and report whether it ended with 0 and printed `wanted`.

    files: what lies in its HOME, by path. environ: its variables besides PATH and HOME; nothing else of ours reaches it. On a
    timeout its process group is killed.
    """
    with tempfile.TemporaryDirectory(prefix="rung-client-") as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        work.mkdir()
        for path, text in files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        home.mkdir(exist_ok=True)
        variables = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": folder, "NO_COLOR": "1", **environ}
        process = subprocess.Popen(
            [str(Path(command[0]).absolute()), *command[1:]], cwd=work, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
            ok, detail = process.returncode == 0 and wanted in output, f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, ok, detail = process.communicate()[0], False, f"did not end within {seconds:g} s"
        print(output, file=sys.stderr)
        told = " ".join(output.split())
        report(api, name, ok, detail if ok else f"{detail}: {told[-320:]}")

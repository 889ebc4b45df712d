"""Environments of other programs, from PyPI or npm, kept in ~/.cache/rung (RUNG_CACHE: another folder)."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from errors import UserError

CACHE = Path(os.environ.get("RUNG_CACHE", Path.home() / ".cache" / "rung"))
INSTALL_SECONDS = 1800


def install(kind: str, name: str, source: Path) -> Path:
    """The folder of an environment with what `source`, a requirements.txt or a package.json, names. Raises UserError if it cannot
    be made."""
    folder, wanted = CACHE / kind / name, digest([source])
    mark = folder / "installed"
    if not mark.exists() or mark.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in _commands(source, folder):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS)
            if done.returncode:
                raise UserError(f"{name}: `{' '.join(command)}` failed: {done.stderr[-2000:]}")
        mark.write_text(wanted)
    return folder


def _commands(source: Path, folder: Path) -> Iterable[list[str]]:
    if source.suffix == ".json":
        yield ["cp", str(source), str(folder)]
        yield ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    else:
        yield [shutil.which("python3", path=os.defpath) or sys.executable, "-m", "venv", "venv"]
        yield ["venv/bin/pip", "install", "-q", "--disable-pip-version-check", "-r", str(source)]


def digest(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in sorted(files):
        content.update(file.read_bytes())
    return content.hexdigest()

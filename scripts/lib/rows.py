"""What rows of a measurement depend on: the code and the weights; and the rows in files of their own."""

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from files import ENGINE, source_digest

CODE = (*ENGINE, "scripts/corpus/*.py", "scripts/corpus/*.toml", "scripts/quality/*.py", "scripts/lib/real_models.py")


@cache
def code_digest() -> str:
    """A digest of what decides the quality that a model is found to have: a setting of its rows."""
    return source_digest(CODE)


def read_row(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file, None if there is none."""
    return dict(json.loads(path.read_text())) if path.exists() else None


def weights_checksum(model: Path) -> str:
    """A checksum of a checkpoint's weights and config, eight hexadecimal digits."""
    value = 0
    for file in [*sorted(model.glob("*.safetensors")), model / "config.json"]:
        value = zlib.crc32(file.read_bytes(), value)
    return f"{value:08x}"

"""What a checkpoint says of itself to people, on the page and in the terminal: `examples.json` beside its weights."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from server.logs import log

FILE = "examples.json"
MAX_BYTES = 1 << 16


class Examples(BaseModel):
    """A sentence without its subject, and prompts that the model can answer."""

    about: str | None = Field(None, max_length=500)
    chat: list[str] = Field([], max_length=8)
    completion: list[str] = Field([], max_length=8)


def read_examples(model: str) -> dict[str, Any] | None:
    """Of the checkpoint at path `model`; None if it has none. A file that is wrong is logged, and left out."""
    path = Path(model)
    file = (path.parent if path.is_file() else path) / FILE
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MAX_BYTES + 1))
        return Examples.model_validate(content).model_dump()
    except (OSError, ValueError, RecursionError, ValidationError) as e:  # ValueError: no JSON, or one cut at MAX_BYTES
        log.warning("%s is left out: %s", file, str(e).splitlines()[0])
        return None

"""Read a checkpoint's `examples.json`: a description and example prompts, shown on the page and in the terminal."""

import json
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from errors import first_line
from files import model_folder
from server.logs import log

FILE = "examples.json"
MAX_BYTES = 1 << 16


class Examples(BaseModel):
    """`about`: a sentence about the model, without its subject. `chat`, `completion`: prompts that the model can answer."""

    about: str | None = Field(None, max_length=500)
    chat: list[str] = Field([], max_length=8)
    completion: list[str] = Field([], max_length=8)


def read_examples(model: str) -> dict[str, Any] | None:
    """The examples of the checkpoint at path `model`; None if there are none. An invalid file is logged and ignored."""
    file = model_folder(model) / FILE
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MAX_BYTES + 1))
        return Examples.model_validate(content).model_dump()
    except (OSError, ValueError, RecursionError, ValidationError) as e:  # ValueError: invalid JSON, or cut at MAX_BYTES
        log.warning("%s is left out: %s", file, first_line(e))
        return None

"""Read a checkpoint's `examples.json`: a description and example prompts, shown on the page and in the terminal."""

from typing import Any

from pydantic import BaseModel, Field, ValidationError

from errors import UserError, first_line
from files import model_folder, read_json
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
    try:
        return Examples.model_validate(read_json(file, MAX_BYTES)).model_dump()
    except FileNotFoundError:
        return None
    except (UserError, ValidationError) as e:
        log.warning("%s is left out: %s", FILE, first_line(e))
        return None

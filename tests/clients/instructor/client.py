from typing import Literal

import instructor
import openai
from features import HELLO, MODEL, URL, feature, run
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": HELLO}]


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


def extract(mode: instructor.Mode) -> None:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    client = instructor.from_openai(plain, mode=mode)
    create = client.chat.completions.create
    assert create(model=MODEL, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=100).city


@feature("chat", "tools")
def _() -> None:
    extract(instructor.Mode.TOOLS)


@feature("chat", "format")
def _() -> None:
    extract(instructor.Mode.JSON_SCHEMA)


@feature("chat", "stream")
def _() -> None:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    partial = client.chat.completions.create_partial(
        model=MODEL, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=100
    )
    assert list(partial)[-1].city


@feature("responses", "tools")
def _() -> None:
    extract(instructor.Mode.RESPONSES_TOOLS)


run()

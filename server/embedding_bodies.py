"""Schemas of the bodies of /v1/embeddings and /v1/score."""

from typing import Any, Literal

from pydantic import Field, model_validator

from engine.protocol import Pooling
from server.body import Body
from server.errors import field_error
from server.schemas import INT64, Prompts, Salt, Texts, Truncation


class PoolingBody(Body):
    """The fields that both endpoints share. `None` stands for the default that the description names."""

    pooling: Pooling | None = Field(
        None, description="Take the mean of all tokens' hidden states, or the last token's. Default: `--embedding-pooling`."
    )
    truncate_prompt_tokens: Truncation = Field(
        None, ge=-1, lt=2**31, description="Keep the last k tokens of each text; -1 keeps as many as the context can hold."
    )
    add_special_tokens: bool | None = Field(None, description="Put BOS in front as the checkpoint does. Default true.")
    priority: int | None = Field(
        None, ge=-INT64, lt=INT64, description="A lower number starts earlier. Other than 0 only with `--allow-priority`."
    )
    cache_salt: Salt | None = Field(None, description="As of /v1/completions, with which it shares the prefix cache.")
    user: str | None = Field(None, description="The first 256 characters are written to the access log.")


class EmbeddingBody(PoolingBody):
    input: Prompts = Field(description="A text, texts, token ids, or lists of token ids.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of the numbers in fp32, little-endian. Default float."
    )
    dimensions: int | None = Field(None, ge=1, lt=2**31, description="Keep the first numbers alone. Default: all.")
    normalize: bool | None = Field(
        None,
        description="Scale each embedding to length 1. Default true, unless the checkpoint's `modules.json` has no `Normalize`.",
    )


class ScoreBody(PoolingBody):
    text_1: Texts = Field(description="A text that is compared with each of `text_2`, or as many texts as `text_2` has.")
    text_2: Texts

    @model_validator(mode="after")
    def _check_lengths(self) -> "ScoreBody":
        first, second = listed(self.text_1), listed(self.text_2)
        if len(first) not in (1, len(second)):
            raise field_error("text_1", f"has {len(first)} texts, but text_2 has {len(second)}; give one text, or as many")
        return self


def listed(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else texts

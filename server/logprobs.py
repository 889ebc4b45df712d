"""Log-probabilities in the two layouts of OpenAI's API, and in that of the `prompt_logprobs` extension."""

from collections.abc import Sequence
from typing import Any

from engine.protocol import Logprob, TokenLogprobs
from engine.text import token_bytes
from tokenizer import Tokenizer


def finite(logprob: float) -> float:
    """`logprob` for JSON, which has no -inf: an excluded token gets -9999, as in OpenAI's API."""
    return max(logprob, -9999.0)


def token_name(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    """The name of a token. A token of incomplete characters is named by its bytes, so that two such tokens differ in name."""
    if as_ids:
        return f"token_id:{token_id}"
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_layout(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    values: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    limit: int,
    as_ids: bool,
) -> dict[str, list[Any]]:
    """Lists with one entry for each token.

    `top_logprobs` always includes the token itself, because evaluation harnesses compare it with the likeliest tokens.
    """

    def top(value: TokenLogprobs) -> dict[str, float]:
        table: dict[str, float] = {}
        for one in (*value.top[:limit], value.chosen):
            table.setdefault(token_name(tokenizer, one.token_id, as_ids), finite(one.logprob))
        return table

    return {
        "tokens": [token_name(tokenizer, token_id, as_ids) for token_id in ids],
        "token_logprobs": [None if value is None else finite(value.chosen.logprob) for value in values],
        "top_logprobs": [None if value is None else top(value) for value in values],
        "text_offset": list(offsets),
    }


def chat_layout(tokenizer: Tokenizer, values: Sequence[TokenLogprobs], limit: int, as_ids: bool) -> dict[str, Any]:
    def entry(one: Logprob) -> dict[str, Any]:
        data = token_bytes(tokenizer, one.token_id)
        token = f"token_id:{one.token_id}" if as_ids else data.decode("utf-8", "replace")
        return {"token": token, "logprob": finite(one.logprob), "bytes": list(data)}

    content = [entry(v.chosen) | {"top_logprobs": [entry(one) for one in v.top[:limit]]} for v in values]
    return {"content": content, "refusal": None}


def by_id_layout(tokenizer: Tokenizer, values: Sequence[TokenLogprobs | None], limit: int) -> list[dict[str, Any] | None]:
    """A dict by token id for each position, the prompt's token first; None for a position without log-probabilities."""

    def entry(one: Logprob) -> dict[str, Any]:
        text = token_bytes(tokenizer, one.token_id).decode("utf-8", "replace")
        return {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": text}

    return [v if v is None else {str(one.token_id): entry(one) for one in (v.chosen, *v.top[:limit])} for v in values]

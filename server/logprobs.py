"""Log-probabilities in the two layouts of OpenAI's API, and in that of the `prompt_logprobs` extension. Where a prompt's tokens
begin in its text."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from engine.protocol import Logprob, TokenLogprobs
from text.tokenizer import IncrementalDetokenizer, Tokenizer


def finite(logprob: float) -> float:
    """`logprob` for JSON, which has no -inf: an excluded token gets -9999, as in OpenAI's API."""
    return max(logprob, -9999.0)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


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


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str, skip_special: bool) -> list[int]:
    """Where the piece of each id of a prompt begins in the prompt's `text`, in characters. The offsets never decrease.

    text: the ids decoded with `skip_special`, or a client's own text, which the ids were made of. They may lack some of its
    characters, such as repeated spaces, and it may lack special tokens, such as the BOS that the tokenizer adds."""
    pieces = _pieces(tokenizer, ids, skip_special)
    if "".join(pieces) == text:
        return list(accumulate(map(len, pieces), initial=0))[: len(ids)]
    return _search_offsets(tokenizer, ids, text)


def _pieces(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> list[str]:
    """What each id adds to the text, and at last the rest."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def _search_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """`text_offsets` of a client's text. It is searched from its end, so that a BOS with which it begins is not taken for the
    added one. Takes linear time: a piece is searched only near the place where it should be."""
    offsets = []
    at = limit = len(text)  # where the next piece ends: at `at`, a guess if the last one was not found; not after `limit`
    for token_id, piece in zip(reversed(ids), reversed(_pieces(tokenizer, ids, False)[:-1]), strict=True):
        special, word, start = token_id in tokenizer.special_ids, piece.lstrip(" "), at - len(piece)
        if not text.endswith(piece, 0, at):
            while at and text[at - 1].isspace():  # the tokenizer may have dropped it
                at -= 1
            near = 0 if special else 2 * len(word)  # a short piece that is found far away is a part of another word
            start = text.rfind(word, max(0, at - len(word) - near), min(limit, at + near))
            if piece != word and text.endswith(" ", 0, max(0, start)):
                start -= 1
        if start >= 0:
            at, limit = start, start if word else limit
        elif not special:
            at = max(0, at - len(word))
        offsets.append(at)
    return list(accumulate(reversed(offsets), max))

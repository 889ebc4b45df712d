"""Convert texts and conversations to token ids and back. These functions run in worker processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from errors import UserError
from server.bounds import TokenBounds, check_characters, check_prediction, check_prompt, check_prompts, cut_prompt
from server.errors import bad
from server.http import to_json
from server.schemas import ChatMessage, Tool
from server.workers import worker_tokenizer

LONG_TEXT = 4096  # characters; longer texts are tokenized in a worker, others in the event loop
SLOW_TEXT = 65536  # characters; longer requests are slow jobs


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template. `options`: arguments of `Tokenizer.encode_chat`."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool]
    options: dict[str, Any]
    own_template: bool  # the request brings its own template


def chat_prompt(chat: Conversation, limits: TokenBounds | None) -> list[int]:
    """The token ids of a conversation, cut as `limits` says. `limits` None: no limits.

    Raises a 400 for messages or a template that cannot be rendered, and for a text that is too long.
    """
    tokenizer = worker_tokenizer()
    check = None if limits is None else lambda text: check_characters(tokenizer, text, limits, "messages")
    messages = [message.model_dump(exclude_none=True) for message in chat.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in chat.tools]
    try:
        ids = tokenizer.encode_chat(messages, check=check, tools=tools or None, **chat.options)
    except UserError as e:
        raise bad("chat_template" if chat.own_template else "messages", str(e)) from e
    return ids if limits is None else _cut(ids, limits, "messages")


def prediction_ids(text: str, limits: TokenBounds) -> list[int]:
    """The token ids of a prediction. Raises a 400 if it is longer than any answer."""
    tokenizer = worker_tokenizer()
    if tokenizer.covers is not None:
        check_prediction(math.ceil(len(text) / tokenizer.covers), limits)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    check_prediction(len(ids), limits)
    return ids


def text_prompts(
    texts: Sequence[str], add_special_tokens: bool, limits: TokenBounds, field: str
) -> list[tuple[list[int], bool]]:
    """The token ids of each text, cut as `limits` says, and whether they are all of its ids. Raises a 400 for too many."""
    tokenizer = worker_tokenizer()
    found: list[tuple[list[int], bool]] = []
    tokens = 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        kept = _cut(ids, limits, field)
        found.append((kept, len(kept) == len(ids)))
        tokens += len(kept)
        check_prompts(tokens, limits, field=field)
    return found


def _cut(ids: list[int], limits: TokenBounds, field: str) -> list[int]:
    """Refuses a prompt that is too long here, so that its ids are not sent to the frontend."""
    kept = cut_prompt(ids, limits)
    check_prompt(kept, limits, field)
    return kept


def prompt_texts(prompts: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
    """The text of each prompt."""
    return [worker_tokenizer().decode(ids, skip_special) for ids in prompts]


def tokenize_reply(given: str | Conversation, add_special_tokens: bool, max_model_len: int | None, strings: bool) -> bytes:
    """The encoded response of POST /tokenize."""
    tokenizer = worker_tokenizer()
    if isinstance(given, str):
        ids = tokenizer.encode(given, add_special_tokens=add_special_tokens)
    else:
        ids = chat_prompt(given, None)
    reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_model_len}
    if strings:
        reply["token_strs"] = [tokenizer.token_text(one) for one in ids]
    return to_json(reply)


def count_reply(chat: Conversation, kind: str | None = None) -> bytes:
    """The encoded response of POST /v1/messages/count_tokens and, with the `object` kind, of POST /v1/responses/input_tokens."""
    return to_json(({"object": kind} if kind else {}) | {"input_tokens": len(chat_prompt(chat, None))})


def detokenize_reply(ids: Sequence[int], skip_special: bool) -> bytes:
    """The encoded response of POST /detokenize. Raises a 400 for ids that cannot be decoded."""
    try:
        return to_json({"prompt": worker_tokenizer().decode(ids, skip_special)})
    except UserError as e:
        raise bad("tokens", str(e)) from e

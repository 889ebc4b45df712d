"""Convert texts and conversations to token ids, in worker processes, and limit how much a request may contain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from errors import UserError
from server.http import to_json
from server.problems import bad, context_error
from server.worker_process import worker_tokenizer
from tokenizer import Tokenizer

LONG_TEXT = 4096  # characters; longer texts are tokenized in a worker, others in the event loop
MAX_PROMPT_TOKENS = 1 << 20  # of one request; raised if the context holds more
MAX_LOGPROBS = 1 << 17  # of a request's prompts, and of its answers; raised to two for each token of a full context
TOO_MANY = "too_many_tokens"
SLOW_TEXT = 65536  # characters; longer requests are slow jobs


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template. Fields are as in `Tokenizer.render_chat` and `Tokenizer.encode_chat`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    parse_special: bool = False  # --parse-control-tokens
    own_template: bool = False  # the request brings its own template


@dataclass(frozen=True)
class Room:
    """Limits of a prompt, in tokens.

    `limit`: the context; a prompt of that many tokens or more is refused. `keep`: cut the prompt at its start to this many.
    `answer`: requested tokens of the answer, for the text of the error.
    """

    limit: int
    keep: int | None = None
    answer: int = 1

    @property
    def total(self) -> int:
        """The most tokens of all prompts of a request. A prompt counts once for each of its answers."""
        return max(MAX_PROMPT_TOKENS, self.limit)

    @property
    def logprobs(self) -> int:
        """The most log-probabilities of all prompts of a request, or of all its answers if they are kept until complete."""
        return max(MAX_LOGPROBS, 2 * self.limit)


def chat_prompt(chat: Conversation, room: Room | None) -> list[int]:
    """The token ids of a conversation. Runs in a worker. `room` None: no limits.

    Raises a 400 for messages or a template that cannot be rendered, and for a text that is too long.
    """
    tokenizer = worker_tokenizer()
    check = None if room is None else lambda text: check_length(tokenizer, text, room, "messages")
    try:
        ids = tokenizer.encode_chat(
            chat.messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            chat_template=chat.chat_template,
            add_special_tokens=chat.add_special_tokens,
            parse_special=chat.parse_special,
            check=check,
            **chat.variables,
        )
    except UserError as e:
        raise bad("chat_template" if chat.own_template else "messages", str(e)) from e
    return ids if room is None else _fit(ids, room, "messages")[0]


def text_prompts(texts: Sequence[str], add_special_tokens: bool, room: Room) -> list[tuple[list[int], bool]]:
    """The token ids of each text, and whether they cover all of it. Runs in a worker. Raises a 400 if they are too many."""
    tokenizer = worker_tokenizer()
    found: list[tuple[list[int], bool]] = []
    tokens = 0
    for text in texts:
        found.append(_fit(tokenizer.encode(text, add_special_tokens=add_special_tokens), room, "prompt"))
        tokens += len(found[-1][0])
        check_total(tokens, room)
    return found


def check_total(tokens: int, room: Room, prompt_logprobs: int | None = None) -> None:
    """Raises a 400 for a request whose prompts are too long together or have too many log-probabilities.

    `tokens`: of all prompts; a prompt counts once for each of its choices.
    """
    advice = "send fewer prompts at once, or lower n"
    if tokens > room.total:
        message = f"has {tokens} tokens or more in all prompts, each counted for every answer; at most {room.total}; {advice}"
        raise bad("prompt", message, TOO_MANY)
    if prompt_logprobs is not None and (values := tokens * (1 + prompt_logprobs)) > room.logprobs:
        message = f"asks for {values} log-probabilities of prompts, counted for every answer; at most {room.logprobs}; {advice}"
        raise bad("prompt", message, TOO_MANY)


def check_logprobs(values: int, room: Room) -> None:
    """Raises a 400 if the answers may have more log-probabilities than can be kept until the answers are complete."""
    if values > room.logprobs:
        message = (
            f"asks for {values} log-probabilities in all answers; at most {room.logprobs}, unless they are streamed; lower "
            "max_tokens, n, the number of prompts, or that of the likeliest tokens"
        )
        raise bad("logprobs", message, TOO_MANY)


def prompt_texts(prompts: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
    """The text of each prompt. Runs in a worker."""
    return [worker_tokenizer().decode(ids, skip_special) for ids in prompts]


def tokenize_reply(given: str | Conversation, add_special_tokens: bool, max_model_len: int | None, strings: bool) -> bytes:
    """The encoded response of POST /tokenize. Runs in a worker, because the list of ids can be long."""
    tokenizer = worker_tokenizer()
    if isinstance(given, str):
        ids = tokenizer.encode(given, add_special_tokens=add_special_tokens)
    else:
        ids = chat_prompt(given, None)
    reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_model_len}
    if strings:
        reply["token_strs"] = [tokenizer.token_text(one) for one in ids]
    return to_json(reply)


def detokenize_reply(ids: Sequence[int], skip_special: bool) -> bytes:
    """The encoded response of POST /detokenize. Runs in a worker. Raises a 400 for ids that cannot be decoded."""
    try:
        return to_json({"prompt": worker_tokenizer().decode(ids, skip_special)})
    except UserError as e:
        raise bad("tokens", str(e)) from e


def check_length(tokenizer: Tokenizer, text: str, room: Room, part: str) -> None:
    """Raises a 400 for a text that cannot fit, because a token covers at most `tokenizer.covers` characters.

    This is far cheaper than tokenizing the text.
    """
    if tokenizer.covers is not None and room.keep is None:
        at_least = math.ceil(len(text) / tokenizer.covers)
        if at_least >= room.limit:
            raise context_error(room.limit, at_least, room.answer, part, part=part, at_least=True)


def _fit(ids: list[int], room: Room, part: str) -> tuple[list[int], bool]:
    """The ids to keep, and whether these are all. Raises a 400 for a prompt that is too long, instead of returning its ids."""
    if room.keep is not None:
        return ids[max(0, len(ids) - room.keep) :], len(ids) <= room.keep
    if len(ids) >= room.limit:
        raise context_error(room.limit, len(ids), room.answer, part, part=part)
    return ids, True

"""Conversations as training examples: find the tokens of the assistant's answers, and pack examples into windows.

An answer begins where the prompt for it ends. It ends with the assistant's end-of-turn token, which is included. Both
positions are found by rendering prefixes of the conversation with the checkpoint's own chat template. The template is not
parsed, so any template works.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from errors import UserError
from text.chat_form import Message
from text.tokenizer import Tokenizer
from training.token_file import TokenFile

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}  # `from` of `conversations`


@dataclass(frozen=True)
class Example:
    """One conversation or document."""

    ids: list[int]
    mask: list[int]  # 1 where the loss counts the token; empty for a document, of which it counts all


def read_messages(record: Mapping[str, Any]) -> list[Message]:
    """The messages of one JSON line: `messages` (role, content), or `conversations` (from, value) as in Infinity-Instruct.

    Raises UserError for anything else.
    """
    messages: list[Message]
    if "conversations" in record:
        turns = _objects(record["conversations"], "conversations")
        messages = [{"role": SHAREGPT_ROLES.get(str(t.get("from")), t.get("from")), "content": t.get("value")} for t in turns]
    else:
        messages = [dict(message) for message in _objects(record.get("messages"), "messages")]
    for message in messages:
        if message.get("role") not in ROLES:
            raise UserError(f"role {message.get('role')!r} of a message is unknown; known: {', '.join(ROLES)}")
        if not message.get("content") and message["role"] == "assistant" and not message.get("tool_calls"):
            raise UserError("an assistant message is empty; give it content or leave the line out")
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise UserError("the conversation has no assistant message that answers another; add one or leave the line out")
    return messages


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise UserError(f"{key} must be a list of objects with at least one; with --chat every line has one")
    return value


def encode_example(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, last_only: bool = False
) -> Example:
    """Tokens and mask of a conversation up to its last answer. last_only: the loss counts only that answer.

    An assistant message at the very beginning answers nothing and is not counted.

    Raises UserError if the template fails, if its text for some messages does not begin with its text for fewer messages,
    or if an answer has no token that ends generation.
    """
    answers = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    text = ""
    ids: list[int] = []
    mask: list[int] = []
    for i in answers[-1:] if last_only else answers:
        prompt = tokenizer.render_chat(messages[:i], tools=tools)
        whole = tokenizer.render_chat(messages[: i + 1], tools=tools, add_generation_prompt=False)
        if not (prompt.startswith(text) and whole.startswith(prompt)):
            raise UserError(
                f"the chat template renders the messages up to the assistant's of number {i + 1} otherwise when that one "
                "follows, so its tokens cannot be told apart; count only each line's last answer with --last-answer"
            )
        ids = _continue(tokenizer, ids, text, prompt)
        mask += [0] * (len(ids) - len(mask))
        ids = _continue(tokenizer, ids, prompt, whole)
        mask += _until_end(tokenizer, ids[len(mask) :])
        text = whole
    return Example(ids, mask)


def _continue(tokenizer: Tokenizer, ids: list[int], text: str, longer: str) -> list[int]:
    """The token ids of `longer`, beginning with `ids`, which are those of `text`, a prefix of `longer`.

    Encoded together, characters on both sides of the boundary may become one token (a newline of the prompt with one of
    the answer). This never happens in serving, where the prompt's tokens are fixed before the answer begins. In that case
    the rest is encoded separately, as a generating model would write it. Raises UserError if the rest alone does not
    encode to its own text.
    """
    whole = tokenizer.encode(longer, add_special_tokens=False)
    if whole[: len(ids)] == ids:
        return whole
    rest = tokenizer.encode(longer[len(text) :], add_special_tokens=False)
    if b"".join(map(tokenizer.token_bytes, rest)) != longer[len(text) :].encode(errors="replace"):
        raise UserError(
            f"the tokenizer joins the end of {text[-20:]!r} with what follows, {longer[len(text) :][:20]!r}, into one token; "
            "take the space off the beginning of that message"
        )
    return ids + rest


def _until_end(tokenizer: Tokenizer, answer: list[int]) -> list[int]:
    """The mask of an answer's tokens: 1 up to and including its end-of-turn token, 0 for what the template writes after it."""
    ends = [i for i, id in enumerate(answer) if id in tokenizer.eos_ids]
    if not ends:
        names = ", ".join(map(tokenizer.token_text, tokenizer.eos_ids)) or "none is known"
        raise UserError(
            f"the chat template ends an answer with no token that ends generation ({names}), so the model would not learn to "
            "stop; add the token to eos_token_id of the checkpoint's generation_config.json"
        )
    return [1] * (ends[-1] + 1) + [0] * (len(answer) - ends[-1] - 1)


# --- packing -------------------------------------------------------------------------------------------------------------


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Pack examples into windows of `capacity` tokens without cutting any. Returns the example numbers in each window.

    Every length must be from 1 to `capacity`. Best-fit decreasing (Ding et al., arXiv:2404.10830, section 3): the
    examples are placed from the longest to the shortest, each into the window in which it leaves the least room.
    `waiting[r]` lists the windows with room for r tokens. Bit r of `rooms` is 1 if there are any.
    """
    windows: list[list[int]] = []
    waiting: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    sizes = np.asarray(lengths)
    for example in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[example])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = waiting[room].pop()
            if not waiting[room]:
                rooms ^= 1 << room
        else:
            room, window = capacity, len(windows)
            windows.append([])
        windows[window].append(example)
        waiting[room - size].append(window)
        rooms |= 1 << (room - size)
    return windows


def packed(examples: TokenFile, lengths: np.ndarray, window: int, padding_id: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids and the mask of each window, (window,) each. The examples are stored one after the other in
    `examples`; `lengths` are their numbers of tokens.

    The rest of a window is filled with `padding_id`. The loss does not count padding. It comes last, so no token of an
    example attends to it.
    """
    assert examples.mask is not None
    ends = np.cumsum(lengths, dtype=np.int64)
    for chosen in best_fit(lengths, window):
        ids, mask, stop = np.full(window, padding_id, examples.tokens.dtype), np.zeros(window, np.uint8), 0
        for example in chosen:
            start, stop = stop, stop + int(lengths[example])
            source = slice(ends[example] - lengths[example], ends[example])
            ids[start:stop], mask[start:stop] = examples.tokens[source], examples.mask[source]
        yield ids, mask

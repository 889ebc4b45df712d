"""Conversations as training examples: which tokens are the assistant's answers, and how examples share windows.

An answer begins where a prompt for it would end, and goes up to and including the token with which the assistant ends its turn.
Both are found by rendering the conversation's beginnings with the checkpoint's own template, which is therefore not parsed and
may be any.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from errors import UserError
from tokenizer import Message, Tokenizer
from training.data import TokenFile

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}  # of `conversations` with `from` and `value`


@dataclass(frozen=True)
class Example:
    """One conversation."""

    ids: list[int]
    mask: list[int]  # 1 where the loss counts the token


def read_messages(record: Mapping[str, Any]) -> list[Message]:
    """The messages of a line: `messages` of role and content, or `conversations` of from and value as in Infinity-Instruct.

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
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    last_only: bool = False,
) -> Example:
    """Tokens and mask of a conversation up to its last answer. last_only: the loss counts only that one.

    An assistant message at the very beginning answers nothing and is not counted.

    Raises UserError if the template fails, if what it renders does not begin with what it renders for fewer messages, or if it
    ends no answer with a token that ends generation.
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
    """The ids of `longer`, which begins with `text`, whose ids they begin with.

    A tokenizer may merge characters across the border (a newline of the prompt with one of the answer). Serving never does: the
    prompt's tokens are fixed when the answer begins. Then the rest is encoded alone, as a generating model would write it.
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
    """The mask of an answer's tokens: 1 up to its end-of-turn token, 0 for what the template writes behind it."""
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
    """Examples, by number, sharing windows of `capacity` tokens, none cut. Every length must be from 1 to `capacity`.

    Best-fit decreasing (Ding et al., arXiv:2404.10830, section 3): from the longest on, each example goes where the least room
    is left behind it. The windows with r tokens of room wait in `waiting[r]`, and bit r of `rooms` says if there are any.
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
    """Windows' ids and masks, (window,) each, from examples of `lengths` tokens that lie one after the other in a file.

    The rest of a window is filled with `padding_id`, which the loss does not count, and to which, being last, nothing attends.
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

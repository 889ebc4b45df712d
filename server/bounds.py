"""What one request may ask for: values and depth of its JSON body, lengths of its prompts and answers, log-probabilities.
Raises 400s.

One byte of JSON can take a hundred bytes in memory, and thousands of bytes in the list of its validation errors. `limits.py`
has what all requests together may hold.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import ApiError, bad, context_error, from_model, unparsable
from text.tokenizer import Tokenizer

B = TypeVar("B", bound=BaseModel)

MAX_DEPTH = 100  # several times the depth of tool schemas
MAX_CONTAINERS = 16384  # lists and objects
MAX_VALUES = 1 << 18  # of all kinds; raised for a model whose context holds more token ids
MAX_PROMPT_TOKENS = 1 << 20  # of one request; raised if the context holds more
MAX_LOGPROBS = 1 << 17  # of a request's prompts, and of its answers; raised to two for each token of a full context
TOO_MANY = "too_many_tokens"


@dataclass(frozen=True)
class BodyBounds:
    """Limits of a body. `values`: list items and object members. `containers`: those that are lists and objects."""

    values: int = MAX_VALUES
    containers: int = MAX_CONTAINERS
    depth: int = MAX_DEPTH


def parse(raw: bytes, model: type[B], bounds: BodyBounds) -> B:
    """Parse a JSON body as `model`. Raises a 400: invalid JSON, too many values, or the first wrong field."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise unparsable(e) from None
    if not surely_within(raw, bounds):
        check_complexity(value, bounds)
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise from_model(e, value) from None


def surely_within(raw: bytes, bounds: BodyBounds) -> bool:
    """Whether the number of brackets and commas alone proves that a body is within `bounds`.

    This test costs almost nothing and is enough for most requests. Others need `check_complexity`.
    """
    containers = raw.count(b"[") + raw.count(b"{")
    return containers <= min(bounds.depth, bounds.containers) and containers + raw.count(b",") <= bounds.values


def check_complexity(value: Any, bounds: BodyBounds) -> None:
    """Raises a 400 for a value that exceeds `bounds`."""
    level, depth, values, containers = [value], 0, 0, 0
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        containers += len(level)
        values += sum(map(len, level))
        if depth > bounds.depth or containers > bounds.containers or values > bounds.values:
            most = f"{bounds.values} values, {bounds.containers} lists and objects, {bounds.depth} levels"
            raise ApiError(400, f"the body has too many values or is nested too deeply; at most: {most}", None, "too_complex")
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]


@dataclass(frozen=True)
class TokenBounds:
    """Limits in tokens.

    `context`: of a prompt and its answer together; a prompt that leaves no room for an answer is refused. `keep`: a prompt is
    cut at its start to this many; None: not cut. `answer`: requested tokens of the answer, for the text of an error; 0: there
    is none.
    """

    context: int
    keep: int | None = None
    answer: int = 1

    @classmethod
    def of_request(cls, context: int, truncate: int | None, max_tokens: int | None) -> "TokenBounds":
        """`truncate`: truncate_prompt_tokens; -1 keeps what the context can hold with the answer. If that is nothing, one
        token is kept, and `fit_answer` refuses the answer."""
        answer = max(max_tokens or 1, 1)
        return cls(context, max(1, context - answer) if truncate == -1 else truncate, answer)

    @classmethod
    def without_answer(cls, context: int, truncate: int | None) -> "TokenBounds":
        """`truncate`: as for `of_request`."""
        return cls(context, context if truncate == -1 else truncate, 0)

    @property
    def prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.context - min(self.answer, 1)

    @property
    def prompt_tokens(self) -> int:
        """The most tokens of all prompts of a request. A prompt counts once for each of its answers."""
        return max(MAX_PROMPT_TOKENS, self.context)

    @property
    def logprobs(self) -> int:
        """The most log-probabilities of all prompts of a request, or of all its answers if they are kept until complete."""
        return max(MAX_LOGPROBS, 2 * self.context)


def check_characters(tokenizer: Tokenizer, text: str, limits: TokenBounds, field: str) -> None:
    """Refuse a text that cannot fit, because a token covers at most `tokenizer.covers` characters.

    This is far cheaper than tokenizing the text.
    """
    if tokenizer.covers is not None and limits.keep is None:
        at_least = math.ceil(len(text) / tokenizer.covers)
        if at_least > limits.prompt:
            raise context_error(limits.context, at_least, limits.answer, field, part=field, at_least=True)


def cut_prompt(ids: list[int], limits: TokenBounds) -> list[int]:
    """The last `limits.keep` ids."""
    return ids if limits.keep is None else ids[max(0, len(ids) - limits.keep) :]


def check_prompt(ids: list[int], limits: TokenBounds, field: str) -> None:
    """Refuse a prompt that leaves no room for an answer. `field`: the request's field, "prompt" or "messages"."""
    if len(ids) > limits.prompt:
        raise context_error(limits.context, len(ids), limits.answer, field, part=field)


def check_prediction(tokens: int, limits: TokenBounds) -> None:
    """Refuse a prediction of `tokens` tokens or more that no answer can hold."""
    if tokens > limits.context:
        message = f"has at least {tokens} tokens, but prompt and answer have at most {limits.context}; send a shorter one"
        raise bad("prediction", message, TOO_MANY)


def fit_prompt(ids: list[int], limits: TokenBounds, vocab_size: int, field: str) -> list[int]:
    """The prompt's ids, cut at the start to `limits.keep`. Refuses a prompt that is empty, too long or has an unknown id."""
    ids = cut_prompt(ids, limits)
    if not ids:
        raise bad(field, "has no tokens; give at least one")
    check_ids(ids, vocab_size, field)
    check_prompt(ids, limits, field)
    return ids


def fit_answer(context: int, prompt: int, max_tokens: int | None, default: int | None, name: str, field: str) -> int:
    """The most tokens that the answer may have, after `prompt` tokens of the prompt.

    `default` is reduced to what is left of the context; None takes all of it. Refuses a `max_tokens` that exceeds it. `name`,
    `field`: the request's fields of `max_tokens` and of the prompt.
    """
    room = context - prompt
    if max_tokens is None:
        return room if default is None else min(default, room)
    if max_tokens > room:
        raise context_error(context, prompt, max_tokens, name, part=field)
    return max_tokens


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    if ids and (highest := max(ids)) >= vocab_size:
        raise bad(field, f"has the token id {highest}, but ids run from 0 to {vocab_size - 1}")


def check_prompts(tokens: int, limits: TokenBounds, prompt_logprobs: int | None = None, field: str = "prompt") -> None:
    """Refuse a request whose prompts are too long together or have too many log-probabilities.

    `tokens`: of all prompts; a prompt counts once for each of its answers.
    """
    advice = "send fewer prompts at once, or lower n"
    if tokens > limits.prompt_tokens:
        message = f"has {tokens} tokens or more in all prompts, each counted for every answer; at most {limits.prompt_tokens}"
        raise bad(field, f"{message}; {advice}", TOO_MANY)
    if prompt_logprobs is not None and (values := tokens * (1 + prompt_logprobs)) > limits.logprobs:
        message = f"asks for {values} log-probabilities of prompts, counted for every answer; at most {limits.logprobs}"
        raise bad("prompt", f"{message}; {advice}", TOO_MANY)


def check_answers(tokens: int, limits: TokenBounds, logprobs: int) -> None:
    """Refuse answers that may have more log-probabilities than can be kept until the answers are complete.

    `tokens`: the most tokens of all answers. `logprobs`: the likeliest tokens that are listed with each.
    """
    if (values := tokens * (1 + logprobs)) > limits.logprobs:
        message = (
            f"asks for {values} log-probabilities in all answers; at most {limits.logprobs}, unless they are streamed "
            "by completions or chats without --journal; lower max_tokens, n, the number of prompts, or that of the likeliest tokens"
        )
        raise bad("logprobs", message, TOO_MANY)

"""What Messages and Responses share where a body becomes that of a chat.

So templates, grammars, limits, fairness and the journal are those of chat completions; `chat.TranslatedChat` is the way back. Workers
run these functions for long conversations.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from server.errors import ApiError, from_model
from server.schemas import ChatBody

Chat = dict[str, Any]  # a part of a chat's body


def chat_of(fields: Mapping[str, Any]) -> ChatBody:
    """The chat's body. None is a field that is not given. Raises a 400 that names the chat's field."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatBody.model_validate(given)
    except ValidationError as e:
        raise from_model(e, given) from None


def chat_function(name: str, **more: Any) -> Chat:
    """A tool, or the choice of one. None is a field that is not given."""
    return {"type": "function", "function": {"name": name} | {key: value for key, value in more.items() if value is not None}}


def chat_call(call_id: str, name: str, arguments: Any) -> Chat:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_schema(schema: dict[str, Any], **more: Any) -> Chat:
    """The response_format of a JSON schema. None is a field that is not given."""
    return {"type": "json_schema", "json_schema": {"schema": schema} | {key: v for key, v in more.items() if v is not None}}


@contextmanager
def renamed(own_name: Callable[[str], str], words: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Errors of the chat name the field of the API's own body: own_name returns it for the path of the chat's field.

    words: what to write instead of other words of the chat's errors.
    """
    try:
        yield
    except ApiError as e:
        if e.param is None:
            raise
        param, message = own_name(e.param), e.message
        for chat_words, own_words in words.items():
            message = message.replace(chat_words, own_words)
        if message.startswith(f"{e.param}: "):
            message = param + message.removeprefix(e.param)
        raise ApiError(e.status_code, message, param, e.code, e.headers) from e

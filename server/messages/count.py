"""Count the tokens of a prompt. Runs in a worker process."""

from server.http import to_json
from server.prompts import Conversation, chat_prompt


def count_reply(chat: Conversation) -> bytes:
    """The encoded response of POST /v1/messages/count_tokens."""
    return to_json({"input_tokens": len(chat_prompt(chat, None))})

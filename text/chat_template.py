"""Renders a conversation with a chat template, as transformers does."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import UserError
from text.chat_form import ChatForm, Message, chat_form

NAMES = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
TOOL = {  # for the conversations that show what a template takes
    "type": "function",
    "function": {
        "name": "other",
        "description": "other",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]},
    },
}
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers; the trailing space shows whether the template strips


def render(
    template: str,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """A conversation that is fitted to the template, as one text. continue_final_message: it ends directly after the last message's
    content.

    Raises UserError for a failing template.
    """
    chat = [dict(message) for message in messages]
    if not continue_final_message:
        return _run(template, chat, variables, add_generation_prompt)
    final = _tag_final_message(chat, template)
    return _cut_after_final_message(_run(template, chat, variables, add_generation_prompt), final)


def _run(template: str, chat: Sequence[Message], variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
    try:
        return _compile_template(template).render(
            {**variables, "messages": chat, "add_generation_prompt": add_generation_prompt}
        )
    except MemoryError:
        raise
    except Exception as e:  # a template can raise any exception, and none of them is an error of the server
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"the chat template failed: {reason}; mend the messages or pass chat_template") from e


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which templates mark a model's answers for training. Here it is replaced by its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=64)
def _compile_template(template: str) -> jinja2.Template:
    """Compile a template with transformers' filters and functions, in a sandbox, because it is untrusted code."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # jinja's own `tojson` escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)


def give_tools(template: str, chat: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """The conversation; for a template that reads tools there, as Phi-4-mini's, with their functions as JSON in a system message."""
    if not tools or "message['tools']" not in template:
        return chat
    is_first = bool(chat) and chat[0]["role"] == "system"
    system = chat[0] if is_first else {"role": "system", "content": ""}
    own = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    return [system | {"tools": own}, *chat[is_first:]]


@functools.lru_cache(maxsize=64)
def form_of(template: str, with_tools: bool) -> ChatForm:
    """What the template takes, with tools or without."""

    def write(messages: Sequence[dict[str, Any]], with_tools: bool) -> str:
        variables = {**NAMES, "documents": None, "tools": [TOOL] if with_tools else None}
        return _run(template, messages, variables, True)

    return chat_form(write, with_tools)


def _tag_final_message(chat: list[dict[str, Any]], template: str) -> str:
    """Append CONTINUE_TAG to the last message's text, in place in `chat`. Returns that text without the tag."""
    content = chat[-1].get("content")
    if "content" not in template:
        raise UserError("continue_final_message needs a chat template that renders the content of messages")
    if isinstance(content, str):
        chat[-1]["content"] = content + CONTINUE_TAG
        return content
    blocks = [dict(block) for block in content] if isinstance(content, list) else []
    for block in reversed(blocks):
        if isinstance(text := block.get("text"), str):
            block["text"] = text + CONTINUE_TAG
            chat[-1]["content"] = blocks
            return text
    raise UserError("continue_final_message is set but the final message has no text; give it content to continue")


def _cut_after_final_message(text: str, final: str) -> str:
    tag = text.rfind(CONTINUE_TAG.strip())
    if tag < 0 or final.strip() not in text:
        raise UserError("the chat template drops or alters the final message; do not set continue_final_message")
    kept = text[tag:].startswith(CONTINUE_TAG)  # if not, the template strips contents, so the result is stripped, too
    return text[:tag] if kept else text[:tag].rstrip()

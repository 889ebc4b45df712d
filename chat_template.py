"""Renders a conversation with a chat template, as transformers does."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import UserError

Message = Mapping[str, Any]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
SHORT_ID = 9  # characters of a call's id that Mistral's templates insist on
NAMES = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
LATER: tuple[dict[str, Any], ...] = ({"role": "assistant", "content": "Answer."}, {"role": "user", "content": "Thanks"})
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers; the trailing space shows whether the template strips


def render(
    template: str,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The conversation as one text. continue_final_message: it ends directly after the last message's content.

    Raises UserError for a failing template and for invalid messages.
    """
    chat = [_plain_message(message) for message in messages]
    if any(message.get("tool_calls") for message in chat) and (form := call_form(template)):
        continued = [chat.pop()] if continue_final_message and chat else []  # its text must stay its own
        chat = [*_with_calls(chat, form), *continued]
    if continue_final_message:
        final = _tag_final_message(chat, template)
    try:
        text = _compile_template(template).render(
            {**variables, "messages": chat, "add_generation_prompt": add_generation_prompt}
        )
    except MemoryError:
        raise
    except Exception as e:  # a template can raise any exception, and none of them is an error of the server
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"the chat template failed: {reason}; mend the messages or pass chat_template") from e
    return _cut_after_final_message(text, final) if continue_final_message else text


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


def _plain_message(message: Message) -> dict[str, Any]:
    """A copy without None values, which templates would print, and with reasoning as `reasoning_content` and `thinking`."""
    if not isinstance(message, Mapping):
        raise UserError(f"a chat message is a {type(message).__name__}; pass objects with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


class CallForm(NamedTuple):
    """How a chat template takes the calls of earlier turns.

    `content`: of a message that has calls and no text. `as_text`: arguments are JSON texts, not objects. `id_length`: of the ids;
    0: any. `apart`: of a message with text and calls it drops the calls. `single`: it refuses several calls in a message.
    """

    content: Literal["absent", "empty", "none"] = "absent"
    as_text: bool = False
    id_length: int = 0
    apart: bool = False
    single: bool = False


@functools.lru_cache(maxsize=64)
def call_form(template: str) -> CallForm | None:
    """The first form in which the template writes a call. None if there is none, as for templates without calls."""
    forms = product((0, SHORT_ID), (False, True), ("absent", "empty", "none"))
    for form in (CallForm(content, as_text, length) for length, as_text, content in forms):  # type: ignore[arg-type]
        if _writes_calls(template, form, ""):
            # neither if the template refuses the further messages, as one does that wants roles to alternate
            parted = form._replace(apart=True)
            apart = not _writes_calls(template, form, "Text.") and _writes_calls(template, parted, "Text.", behind=LATER)
            single = not _writes_calls(template, form, "", 2) and _writes_calls(template, form._replace(single=True), "", 2)
            return form._replace(apart=apart, single=single)
    return None


def _writes_calls(template: str, form: CallForm, text: str, count: int = 1, behind: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether the template writes all calls of a short conversation, with arguments as JSON. behind: messages after the results."""
    calls, results = [], []
    for i in range(count):
        arguments: Any = {f"key{i}": f"value{i}"}
        function = {"name": "call", "arguments": json.dumps(arguments) if form.as_text else arguments}
        call_id = str(i) * (form.id_length or 2 * SHORT_ID)
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "name": "call", "tool_call_id": call_id, "content": "result"})
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    chat = _with_calls([{"role": "user", "content": "Hi"}, message, *results, *behind], form)
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "other", "description": "other", "parameters": parameters}}
    variables = {**NAMES, "documents": None, "tools": [tool], "messages": chat, "add_generation_prompt": True}
    try:
        written = _compile_template(template).render(variables)
    except MemoryError:
        raise
    except Exception:  # the form is not this template's
        return False
    # an object that is printed as Python's, and a text that is encoded once more, are no JSON
    return all(f"value{i}" in written and f"'key{i}'" not in written and f'\\"key{i}' not in written for i in range(count))


def _with_calls(chat: Sequence[dict[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """The conversation, with its calls as `form` says."""
    chat = _one_by_one(chat) if form.single else chat
    return [one for message in chat for one in (_parted(message, form) if message.get("tool_calls") else (message,))]


def _one_by_one(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call in a message of its own, followed by its result."""
    found: list[dict[str, Any]] = []
    rest = list(reversed(chat))
    while rest:
        message = rest.pop()
        first, *others = message.get("tool_calls") or [None]
        results: dict[Any, list[dict[str, Any]]] = {}
        while others and rest and rest[-1].get("role") == "tool":
            result = rest.pop()
            results.setdefault(result.get("tool_call_id"), []).append(result)
        found.append({**message, "tool_calls": [first]} if others else message)
        for call in others:
            found += results.pop(first.get("id"), [])
            found.append({"role": message["role"], "tool_calls": [call]})
            first = call
        found += [one for group in results.values() for one in group]
    return found


def _parted(message: dict[str, Any], form: CallForm) -> Iterator[dict[str, Any]]:
    """A message with calls: its content as `form` says."""
    if message.get("content") and not form.apart:
        yield message
        return
    left_out: tuple[str, ...] = ("content",)
    if message.get("content"):
        yield {key: value for key, value in message.items() if key != "tool_calls"}
        left_out = ("content", *REASONING_KEYS)
    bare = {key: value for key, value in message.items() if key not in left_out}
    yield bare if form.content == "absent" else {**bare, "content": "" if form.content == "empty" else None}


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

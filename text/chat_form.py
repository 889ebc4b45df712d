"""Chat templates: a conversation fitted to its template, so that the prompt has the text of every message and every tool call, and
rendered as transformers does.

Templates differ in the roles that they know and in how they take calls. `chat_form` finds out what a template takes by rendering
short conversations, and `fit` changes only what it does not take.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json

from errors import UserError

Message = Mapping[str, Any]
Plain = dict[str, Any]
Render = Callable[[Sequence[Plain], bool], str]  # messages, and whether there are tools

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
INSTRUCTING = ("system", "developer")
SHORT_ID = 9  # characters of a call's id that Mistral's templates insist on
BETWEEN = "\n\n"  # messages that become one
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


class ChatForm(NamedTuple):
    """What a chat template takes. Each default is the usual form, in which a conversation stays as it is.

    `parts`: a content is a list of text parts. `alternate`: messages of user and assistant must alternate, calls and results aside.
    `developer`, `system`: these roles; without them a message becomes one of system or user. `together`: those in front of the first
    turn must be one message. `middle`: they may also come later. `opening`: the first turn must be the user's. `blank`: the content of
    a message without text. `results`: the role tool; else a result is the user's.
    `calls`: the content of a message that has calls and no text; "text": calls are written into it. `as_text`: arguments are JSON
    texts, not objects. `id_length`: of calls' ids; 0: any. `apart`: of a message with text and calls, the template drops one, so they
    become two. `single`: it refuses several calls in a message.
    """

    parts: bool = False
    alternate: bool = False
    developer: bool = True
    system: bool = True
    together: bool = False
    middle: bool = True
    opening: bool = False
    blank: str = ""
    results: bool = True
    calls: Literal["absent", "empty", "none", "text"] = "absent"
    as_text: bool = False
    id_length: int = 0
    apart: bool = False
    single: bool = False


# --- what a template takes -----------------------------------------------------------------------------------------------------

U, A, S, D, R = ({"role": role, "text": True} for role in ("user", "assistant", "system", "developer", "tool"))
BLANK, C, CC = ({"role": "assistant", "calls": count} for count in range(3))
TC = {**C, "text": True}
CALLS = [
    {"calls": content, "as_text": as_text, "id_length": length}
    for length, as_text, content in product((0, SHORT_ID), (False, True), ("absent", "empty", "none"))
]
# Conversations, and the changes of the form that may make a template write them, the least one first.
PROBES: tuple[tuple[Sequence[Plain], Sequence[Plain]], ...] = (
    ([U], [{"parts": True}]),
    ([U, U, A, A, U], [{"alternate": True}]),
    ([U, BLANK, U], [{"blank": " "}]),
    ([A, U], [{"opening": True}, {"alternate": True}]),
    ([S, U], [{"system": False}, {"system": False, "alternate": True}]),
    ([D, U], [{"developer": False}]),
    ([S, D, S, U], [{"together": True}]),
    ([S, U, A, S, U, A, D, U, S], [{"middle": False}, {"middle": False, "alternate": True}]),
    ([U, C, R], [*CALLS, {"calls": "text"}, {"calls": "text", "results": False}]),
    ([U, CC, R, R], [{"single": True}]),
    ([U, TC, R, A, U], [{"apart": True}, {"apart": True, "alternate": True}]),
    ([U, C, R, U, C, R, A, U], [{"alternate": True}]),
    ([S], [{"opening": True}]),
    ([C, R, A, U], [{"opening": True}]),
)


def chat_form(render: Render, with_tools: bool) -> ChatForm:
    """The form of the template that `render` renders. Where nothing makes it write a text, the form stays the usual one."""
    form = ChatForm()
    for probe, changes in PROBES:
        candidates = (form._replace(**change) for change in ({}, *changes))
        form = next((one for one in candidates if _writes(render, probe, one, with_tools)), form)
    return form


def _writes(render: Render, probe: Sequence[Plain], form: ChatForm, with_tools: bool) -> bool:
    """Whether the template writes all texts of a conversation, and the arguments of its calls as an object."""
    chat, texts, ids = list[Plain](), list[str](), list[str]()
    for i, shape in enumerate(probe):
        count = shape.get("calls", 0)
        message: Plain = {"role": shape["role"]}
        if "text" in shape:
            texts.append(f"text{i}x")
            message["content"] = texts[-1]
        if count:
            ids = [f"{i}{k}".ljust(2 * SHORT_ID, "0") for k in range(count)]
            texts += [f"value{i}{k}x" for k in range(count)]
            functions = [{"name": "call", "arguments": {f"key{i}{k}x": f"value{i}{k}x"}} for k in range(count)]
            message["tool_calls"] = [{"id": one, "function": function} for one, function in zip(ids, functions, strict=True)]
        if shape["role"] == "tool":
            message["tool_call_id"] = ids.pop(0)
        chat.append(message)
    try:
        written = render(fit(chat, form), with_tools)
    except UserError:  # the form is not this template's
        return False
    # an object that is printed as Python's, and a text that is encoded once more, are no JSON
    return all(text in written for text in texts) and "'key" not in written and '\\"key' not in written


# --- a conversation in a form --------------------------------------------------------------------------------------------------


def fit(messages: Iterable[Message], form: ChatForm, continued: bool = False) -> list[Plain]:
    """The conversation as a template of this form takes it. continued: the answer continues the last message's text, which is
    parted from its calls. Raises UserError for messages that are no objects."""
    chat = _complete([_plain(message) for message in messages])
    if continued and chat and "tool_calls" in chat[-1]:  # the answer continues the text
        chat[-1:] = [{**chat[-1], "content": ""}, {"role": "assistant", "content": chat[-1].get("content", "")}]
    chat = [one for message in chat for one in _fit_calls(message, form)] if form.calls != "text" else [*map(_spelled, chat)]
    chat = _fit_roles(_one_by_one(chat) if form.single else chat, form)
    chat = _alternating(chat) if form.alternate else chat
    first = next((i for i, message in enumerate(chat) if message.get("role") not in INSTRUCTING), len(chat))
    if form.opening and (first == len(chat) or chat[first].get("role") != "user"):
        chat.insert(first, {"role": "user", "content": ""})
    return [_worded(message, form) for message in chat]


def _worded(message: Plain, form: ChatForm) -> Plain:
    content = message.get("content")
    if not isinstance(content, str) or (message.get("tool_calls") and not content):
        return message
    content = content or form.blank
    return {**message, "content": [{"type": "text", "text": content}] if form.parts else content}


def _plain(message: Message) -> Plain:
    """A copy without None values, which templates would print, with its text as one string, and with reasoning as
    `reasoning_content` and `thinking`."""
    if not isinstance(message, Mapping):
        raise UserError(f"a chat message is a {type(message).__name__}; pass objects with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
        plain.setdefault("content", "")
    if isinstance(parts := plain.get("content"), list):
        texts = [part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part for part in parts]
        if all(isinstance(text, str) for text in texts):
            plain["content"] = "\n".join(texts)
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _complete(chat: list[Plain]) -> list[Plain]:
    """Calls and results get what some templates need: types, ids, and a result its function's name. A result without a call, as
    clients send it if they cut a conversation at its start, is the user's."""
    names: dict[str, str] = {}
    unanswered, open_calls = list[str](), False  # results may follow
    for i, message in enumerate(chat):
        if calls := message.get("tool_calls"):
            calls = [dict(call) for call in calls]
            for k, call in enumerate(calls):
                call |= {"id": call.get("id") or f"call_{i}_{k}", "type": "function", "function": dict(call["function"])}
                names[call["id"]] = call["function"]["name"]
            message["tool_calls"] = calls
            unanswered, open_calls = [call["id"] for call in calls], True
        elif message.get("role") == "tool" and open_calls:
            call_id = message.get("tool_call_id") or (unanswered[0] if unanswered else "")
            unanswered = [one for one in unanswered if one != call_id]
            message.setdefault("tool_call_id", call_id)
            if call_id in names:
                message.setdefault("name", names[call_id])
        else:
            open_calls = False
            if message.get("role") == "tool":
                message["role"] = "user"
    return chat


def _fit_calls(message: Plain, form: ChatForm) -> list[Plain]:
    """A message, with its calls as `form` says; two messages if text and calls must be apart."""
    message = {**message, "tool_call_id": _call_id(message["tool_call_id"], form)} if "tool_call_id" in message else message
    if "tool_calls" not in message:
        return [message]
    calls = [
        {**call, "id": _call_id(call["id"], form), "function": {**call["function"], "arguments": _arguments(call, form)}}
        for call in message["tool_calls"]
    ]
    message = {**message, "tool_calls": calls}
    if message.get("content") and not form.apart:
        return [message]
    left_out = ("content", *REASONING_KEYS) if message.get("content") else ("content",)
    bare = {key: value for key, value in message.items() if key not in left_out}
    if form.calls != "absent":
        bare["content"] = "" if form.calls == "empty" else None
    return [{key: value for key, value in message.items() if key != "tool_calls"}, bare] if message.get("content") else [bare]


def _call_id(given: str, form: ChatForm) -> str:
    """The id, or if the template checks the length of ids and this is another one, a digest of it."""
    length = form.id_length
    if not length or (len(given) == length and given.isascii() and given.isalnum()):
        return given
    return hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:length]


def _arguments(call: Plain, form: ChatForm) -> Any:
    """The arguments of a call, which are an object or its JSON text, as the template takes them."""
    given = call["function"].get("arguments")
    value = read_arguments(given) if isinstance(given, str) else given or {}
    if not isinstance(value, dict):
        value = {"arguments": value}
    if not form.as_text:
        return value
    return given if isinstance(given, str) and _is_object(given) else json.dumps(value, ensure_ascii=False)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_arguments(text: str) -> Any:
    """What a model has written as the arguments of a call. Raw line breaks, a repetition and a missing end do not matter; a text
    that is no JSON all the same is a string. An empty one has no arguments."""
    text = text.strip()
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text or "{}")
        return value if text[end:].strip() in ("", text[:end]) else text
    except (ValueError, RecursionError):
        pass
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return text


def _spelled(message: Plain) -> Plain:
    """The message with its calls as text, for a template that has no form for them."""
    calls = [
        {"name": call["function"]["name"], "arguments": _arguments(call, ChatForm())} for call in message.get("tool_calls", [])
    ]
    texts = [message.get("content") or "", *(json.dumps(call, ensure_ascii=False) for call in calls)]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(filter(None, texts))} if calls else message


def _one_by_one(chat: Sequence[Plain]) -> list[Plain]:
    """Each call in a message of its own, followed by its result."""
    found = list[Plain]()
    rest = list(reversed(chat))
    while rest:
        message = rest.pop()
        first, *others = message.get("tool_calls") or [None]
        results: dict[Any, list[Plain]] = {}
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


def _fit_roles(chat: Iterable[Plain], form: ChatForm) -> list[Plain]:
    found = list[Plain]()
    begun = False  # the first turn has
    for message in chat:
        role = message.get("role")
        if role == "tool" and not form.results:
            message = {**message, "role": "user"}
        elif role not in INSTRUCTING:
            begun = True
        elif not (form.middle if begun else form.system):
            message = {**message, "role": "user"}
        elif role == "developer" and not form.developer:
            message = {**message, "role": "system"}
        if found and not begun and form.together and found[-1]["role"] in INSTRUCTING and message["role"] in INSTRUCTING:
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _alternating(chat: Iterable[Plain]) -> list[Plain]:
    """Messages of one role become one, and an empty one is put where the other role is missing."""
    found = list[Plain]()
    due = "user"
    for message in chat:
        role, calls, last = message.get("role"), "tool_calls" in message, found[-1] if found else {}
        if role in ("user", "assistant"):
            if role == last.get("role") and role != due and not calls and "tool_calls" not in last:
                found[-1] = _joined(last, message)
                continue
            if role != due:
                found.append({"role": due, "content": ""})
            due = "assistant" if role == "user" or calls else "user"
        found.append(message)
    return found


def _joined(first: Plain, second: Plain) -> Plain:
    """Two messages as one."""
    both = {key: (first[key], second[key]) for key in ("content", *REASONING_KEYS) if key in first and key in second}
    texts = {key: BETWEEN.join(filter(None, pair)) for key, pair in both.items() if all(isinstance(one, str) for one in pair)}
    return {**second, **first, **texts}


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

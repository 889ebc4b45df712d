"""A conversation in the form that its chat template takes: the prompt has the text of every message and call.

The templates are short, and behave as published ones of the families in what they take.
"""

import json
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from text.chat_form import NAMES, TOOL, ChatForm, fit, form_of, read_arguments, render

RAISE = "{{ raise_exception('no') }}"
KNOWN = "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}" + RAISE + "{% endif %}"
ALTERNATING = """{% for m in messages if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (loop.index % 2 == 1) %}
{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"""
TURNWISE = """{% for m in messages if m.tool_calls %}{% if loop.length > 1 %}
{{ raise_exception('calls in one turn') }}{% endif %}{% endfor %}"""


def loop(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


def each_call(body: str) -> str:
    return "{% for c in m.tool_calls or [] %}" + body + "{% endfor %}"


def refused(condition: str) -> str:
    return "{% if " + condition + " %}" + RAISE + "{% endif %}"


TEXT, CALLS = "{{ m.content or '' }}", each_call("{{ c.function | tojson }}")
ARGUMENTS = "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %}"
TURNS = (
    "{% if m.role == 'user' %}{% if loop.first and system is defined %}{{ system }}{% endif %}{{ m.content }}{% elif m.tool_calls %}"
    + each_call(refused("c.id | length != 9") + "{{ c.function | tojson }}")
    + "{% elif m.role in ('tool', 'assistant') %}{{ m.content }}{% else %}"
    + RAISE
    + "{% endif %}"
)
TEMPLATES = {
    "all roles": loop("<{{ m.role }}>" + TEXT + CALLS),
    "a known role": loop(KNOWN + TEXT + CALLS),
    "other roles dropped": loop(
        "{% if m.role in ('system', 'user', 'tool', 'assistant') %}{{ m['content'] + '' }}{% endif %}" + CALLS
    ),
    "no calls": loop("{{ '' + m['content'] }}"),
    "no tools, alternating": loop(
        refused("(m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ('user', 'assistant')")
        + "{{ m.content | trim }}"
    ),
    "the first system message": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + loop("{% if m.role != 'system' %}" + KNOWN + TEXT + CALLS + "{% endif %}"),
    "system in front alone": loop(refused("m.role == 'system' and not loop.first") + "{{ m.content }}" + CALLS),
    "turns, ids, text or calls": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}" + ALTERNATING + loop(TURNS),
    "parts": loop("{% for part in m.content %}{{ part.text }}{% endfor %}" + CALLS),
    "one call, no text": loop(
        "{% if m.tool_calls %}"
        + refused("m.tool_calls | length != 1")
        + "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    ),
    "items": loop(TEXT + each_call(ARGUMENTS)),
    "texts": loop(TEXT + each_call("{{ c.function.name + c.function.arguments }}")),
    "calls of none": loop(
        "{% if m.content is none %}"
        + each_call("{{ c.type + c.function.arguments }}")
        + "{% else %}{{ m.content + '' }}{% endif %}"
    ),
    "a question": refused("messages | selectattr('role', 'equalto', 'user') | list | length == 0") + loop(TEXT + CALLS),
    "answers with text": loop(refused("not m.content and not m.tool_calls") + TEXT + CALLS),
}


def conversation() -> tuple[list[dict[str, Any]], list[str]]:
    """Messages of random roles, and the words of which each must be in the prompt."""
    numbers, words, chat = count(), list[str](), list[dict[str, Any]]()

    def word() -> str:
        words.append(f"word{next(numbers)}x")
        return words[-1]

    def calls() -> list[dict[str, Any]]:
        return [
            {
                "id": random.choice([f"call_{next(numbers)}", None]),
                "type": random.choice(["function", None]),
                "function": {"name": "call", "arguments": arguments(word)},
            }
            for _ in range(random.randint(1, 3))
        ]

    for _ in range(random.randint(1, 8)):
        role = random.choice(["system", "developer", "user", "assistant", "assistant", "tool"])
        message: dict[str, Any] = {
            "role": role,
            "content": random.choice([word, lambda: [{"type": "text", "text": word()} for _ in range(2)]])(),
        }
        if role == "assistant" and random.random() < 0.7:
            message["tool_calls"] = calls()
            message["content"] = random.choice([message["content"], None, ""])
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": random.choice([word(), None])}
                for call in message["tool_calls"]
            ]
            chat += [message, *random.sample(results, random.randint(0, len(results)))]
        else:
            chat.append(message | random.choice([{}, {"tool_calls": None, "refusal": None}, {"tool_calls": [], "name": None}]))
    there = json.dumps(chat)
    return chat, [one for one in words if one in there]


def arguments(word: Callable[[], str]) -> Any:
    """The arguments of a call, as models write them."""
    value = {"key": word(), "other": [1, {"a": None}]}
    text = json.dumps(value)
    ways: list[Any] = [
        value,
        text,
        text[: random.randrange(text.index("x") + 1, len(text))],
        text * 2,
        text.replace("x", "x\n"),
        f"[{text}]",
        f"call({value['key']})",
    ]
    return random.choice(ways)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("with_tools", [False, True])
def test_the_prompt_has_every_text(name: str, with_tools: bool, seed: int) -> None:
    template = TEMPLATES[name].replace("\n", "")
    for _ in range(40):
        chat, words = conversation()
        before = json.dumps(chat)
        prompt = written(template, chat, with_tools)
        assert [word for word in words if word not in prompt] == [], (chat, prompt)
        assert json.dumps(chat) == before


def written(template: str, chat: list[dict[str, Any]], with_tools: bool = False) -> str:
    variables = {**NAMES, "documents": None, "tools": [TOOL] if with_tools else None}
    return render(template, fit(chat, form_of(template, with_tools)), variables, True, False)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TEMPLATES["all roles"], ChatForm()),
        (TEMPLATES["a known role"], ChatForm(developer=False)),
        (TEMPLATES["parts"], ChatForm(parts=True)),
        (refused("not add_generation_prompt") + TEMPLATES["parts"], ChatForm(parts=True)),
        (TEMPLATES["answers with text"], ChatForm(blank=" ")),
        (TEMPLATES["a question"], ChatForm(opening=True)),
        (TEMPLATES["no calls"], ChatForm(calls="text")),
        (loop("{{ m.content }}" + each_call("{{ c.function.arguments }}")), ChatForm(as_text=True)),
        (loop("{{ m.content + '' }}" + CALLS), ChatForm(calls="empty")),
        (loop("{{ m.content }}" + each_call("{{ c.function | tojson if c.id | length < 10 }}")), ChatForm(id_length=9)),
        (loop("{{ m.content or m.tool_calls | tojson }}"), ChatForm(blank=" ", apart=True)),
        (loop("{{ m.content }}" + each_call("{{ c.function | tojson if m.tool_calls | length == 1 }}")), ChatForm(single=True)),
        (TURNWISE + loop("{{ m.content }}" + CALLS), ChatForm()),
        (RAISE, ChatForm()),
        (loop("{{ m.content }}{% if tools %}" + CALLS + "{% endif %}"), ChatForm()),
    ],
)
def test_the_form_of_a_template(template: str, form: ChatForm) -> None:
    """Only what a template does not take is changed."""
    assert form_of(template, True) == form


def test_roles_alternate() -> None:
    form = ChatForm(alternate=True, system=False, middle=False, developer=False)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    said: list[Any] = ["assistant A", "user B", "developer C", "call", "tool D", "user E", "assistant F", "assistant G", "call"]
    pairs = [one.split() for one in said]
    chat = [{"role": "assistant", "tool_calls": [call]} if p == ["call"] else {"role": p[0], "content": p[1]} for p in pairs]
    assert [(m["role"], m.get("content")) for m in fit(chat, form)] == [
        ("user", ""), ("assistant", "A"), ("user", "B\n\nC"), ("assistant", None), ("tool", "D"), ("assistant", ""),
        ("user", "E"), ("assistant", "F\n\nG"), ("user", ""), ("assistant", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("", {}),
        (" \n", {}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a":1}{"a":1}', {"a": 1}),
        ('{"a":1}\n{"a":1}', {"a": 1}),
        ('{"a":1}{"a":2}', '{"a":1}{"a":2}'),
        ('{"a": 1, "b": "lo', {"a": 1, "b": "lo"}),
        ('{"a": 1, "b": [2, ', {"a": 1, "b": [2]}),
        ("{'a': 1}", "{'a': 1}"),
        ("no JSON", "no JSON"),
        ("[1]", [1]),
    ],
)
def test_arguments_are_read_as_far_as_they_go(text: str, value: Any) -> None:
    assert read_arguments(text) == value


def test_arguments_that_are_no_object_become_one() -> None:
    for given in ("[1]", [1], "5", "no JSON", "9" * 5000, '{"a":' * 5000):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
        for form in (ChatForm(), ChatForm(as_text=True)):
            (message,) = fit([{"role": "assistant", "tool_calls": [call]}], form)
            found = message["tool_calls"][0]["function"]["arguments"]
            assert list(json.loads(found) if form.as_text else found) == ["arguments"]


def test_a_result_has_the_id_and_the_name_of_its_call() -> None:
    calls = [{"id": one, "function": {"name": name, "arguments": {}}} for one, name in (("a", "f"), (None, "g"))]
    chat = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "1"}, {"role": "tool", "content": None}]
    answer, *results = fit(chat, ChatForm())
    assert [one["tool_call_id"] for one in results] == [one["id"] for one in answer["tool_calls"]] == ["a", "call_0_1"]
    assert [one["name"] for one in results] == ["f", "g"] and results[1]["content"] == ""


TURN = "{% for m in messages %}<{{ m.role }}>BODY\n{% endfor %}"
APART = TURN.replace("BODY", "{{ m.reasoning_content }}|{{ m.content or m.tool_calls | tojson }}")


def calling(text: str, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "a" * 9, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text, "tool_calls": [call], **fields}]


def test_a_template_without_calls_gets_them_as_text() -> None:
    text = written(TURN.replace("BODY", "{{ m['content'] + '!' }}"), calling("Look"))
    assert text == '<user>Hi!\n<assistant>Look\n{"name": "f", "arguments": {"x": 1}}!\n'


def test_a_message_that_is_parted_has_its_reasoning_once_and_can_be_continued() -> None:
    text = written(APART, calling("Look", reasoning_content="Think"))
    assert text.startswith("<user>|Hi\n<assistant>Think|Look\n<assistant>|[{") and text.count("Think") == 1
    chat = fit(calling("Look"), form_of(APART, False), continued=True)
    said, calls, last = render(APART, chat, {}, False, True).split("\n")
    assert (said, last) == ("<user>|Hi", "<assistant>|Look") and '"x": 1' in calls

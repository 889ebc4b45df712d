"""Reasoning and tool calls in answers, as families of models write them."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.calls import syntax as call_syntax
from engine.calls.choice import answer_parser
from engine.calls.parser import AnswerParser, Arguments, Call, Part, PartList, Reasoning, Text, Tools
from engine.calls.reader import Reader
from engine.calls.syntax import GLM, PYTHON, QWEN, SEED, SYNTAXES, syntax_of
from engine.protocol import ThinkingBudget
from engine.thinking import REASONING, reasoning_of
from errors import UserError
from server import replies
from tests.support.constrained import accepts
from tests.support.server_thread import CHAT, EOS, TOKENIZER, TOOL, Site
from text.tokenizer import Tokenizer

NAMES = frozenset(["weather", "now", "add"])
ULM = '{"city": "Ulm"}'
NESTED = '{"x": [1, {"y": "}] \\" </tool_call> é\\\\"}], "z": {}}'

SCHEMAS: dict[str, Any] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"$ref": "#/$defs/Days"}, {"type": "null"}]},
            "hours": {"type": ["array", "null"]},
            "unit": {"enum": ["C", "7"]},
        },
        "$defs": {"Days": {"type": "integer"}},
    },
    "add": {"properties": {"x": {"type": "array"}, "z": {"type": "object"}}},
}
TYPED = '{"city": "12", "days": 3, "hours": [6, 18], "unit": "7", "flag": true, "more": "a \\"b\\" & {c}"}'  # of `weather`
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
BEGIN, CALL, SEPARATOR, END, CLOSE = DEEPSEEK
CHANNEL = "<|channel|>commentary"
KIMI = "<|tool_call_begin|>functions."
TO_ARGUMENTS = "<|tool_call_argument_begin|>"


def tagged(name: str, values: dict[str, str]) -> tuple[str, str, str, str]:
    """A call as Qwen3-Coder, GLM-4.5, GLM-4.7 and Seed-OSS write it."""
    qwen = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    seed = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    glm = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
    return (
        f"<tool_call>\n<function={name}>\n{qwen}</function>\n</tool_call>",
        f"<tool_call>{name}\n{''.join(glm)}</tool_call>",
        f"<tool_call>{name}{''.join(glm)}</tool_call>".replace("\n", ""),
        f"<seed:tool_call>\n<function={name}>\n{seed}</function>\n</seed:tool_call>",
    )


TYPED_CALLS = tagged(
    "weather", {"city": "12", "days": "3", "hours": "[6, 18]", "unit": "7", "flag": "true", "more": 'a "b" & {c}'}
)
PYTHON_TYPES = "weather(city='12', days=3, hours=[6, 18], unit='7', flag=True, more=\"a \\\"b\\\" & {c}\")"
NOW = tagged("now", {})
LINES = '{"city": "\\na\\n", "hours": null}'  # a value with lines at its ends

# name of the parser, the answer, and what it consists of: a str is text, a pair is a call
CASES: list[tuple[str, str, list[Any]]] = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ULM}}}\n</tool_call>', [("weather", ULM)]),
    (
        "hermes",
        f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {ULM}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {NESTED}}}\n</tool_call>\nThat is all.',
        ["Let me look.", ("weather", ULM), ("add", NESTED), "That is all."],
    ),
    ("hermes", f'<tool_call>{{"arguments": {ULM}, "name": "weather"}}</tool_call>', [("weather", ULM)]),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', [("now", "{}")]),
    ("hermes", '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>', None),
    ("hermes", "Write <tool_call> and {braces}.", None),
    ("llama3_json", f'{{"name": "weather", "parameters": {ULM}}}', [("weather", ULM)]),
    ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ULM}}}', [("weather", ULM)]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {ULM}}}; {{"name": "now", "parameters": {{}}}}',
        [("weather", ULM), ("now", "{}")],
    ),
    ("llama3_json", '{"name": "weather", "city": "Ulm"}', None),
    ("llama3_json", '{"city": "Ulm"} is JSON', None),
    (
        "mistral_list",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ULM}, "id": "a1b2c3d4e"}}, {{"name": "now", "arguments": {{}}}}]',
        [("weather", ULM), ("now", "{}")],
    ),
    ("mistral", f"Ja.[TOOL_CALLS]weather[ARGS]{ULM}[TOOL_CALLS]now[ARGS]{{}}", ["Ja.", ("weather", ULM), ("now", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{ULM}", [("weather", ULM)]),
    ("mistral", f"[TOOL_CALLS] weather[ARGS]{ULM}", [("weather", ULM)]),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ULM}}}]', [("weather", ULM)]),
    ("mistral", "[TOOL_CALLS]nothing[ARGS]{}", ["nothing{}"]),
    ("mistral", "A [link](x), [TOOL] and [", None),
    *[
        (name, text, parts)
        for name, typed, now, lines in zip(
            ("qwen3_coder", "glm45", "glm47", "seed_oss"),
            TYPED_CALLS,
            NOW,
            tagged("weather", {"city": "\na\n", "hours": "null"}),
            strict=True,
        )
        for text, parts in (
            (typed, [("weather", TYPED)]),
            (f"So:\n{typed}\n{now}", ["So:", ("weather", TYPED), ("now", "{}")]),
            (lines if name != "glm47" else now, [("weather", LINES) if name != "glm47" else ("now", "{}")]),
            ("<tool_call>nothing</tool_call> <tool_call> and <arg_key>", None),
        )
    ],
    ("qwen3_coder", TYPED_CALLS[0].removeprefix("<tool_call>\n"), [("weather", TYPED)]),  # as models often write it
    ("qwen3_coder", f'<tool_call>\n{{"name": "weather", "arguments": {ULM}}}\n</tool_call>', [("weather", ULM)]),
    (
        "kimi_k2",
        f"Ja. <|tool_calls_section_begin|>{KIMI}weather:0{TO_ARGUMENTS}{ULM}<|tool_call_end|>"
        f"{KIMI}now:1{TO_ARGUMENTS}{{}}<|tool_call_end|><|tool_calls_section_end|>",
        ["Ja.", ("weather", ULM), ("now", "{}")],
    ),
    ("kimi_k2", f"{KIMI}nothing:0{TO_ARGUMENTS}{{}}", ["functions.nothing:0{}"]),
    (
        "deepseek_v3",
        f"{BEGIN}{CALL}function{SEPARATOR}weather\n```json\n{ULM}\n```{END}\n"
        f"{CALL}function{SEPARATOR}add\n```json\n{NESTED}\n```{END}{CLOSE}",
        [("weather", ULM), ("add", NESTED)],
    ),
    (
        "deepseek_v31",
        f"Hm.{BEGIN}{CALL}weather{SEPARATOR}{ULM}{END}{CALL}now{SEPARATOR}{{}}{END}{CLOSE}",
        ["Hm.", ("weather", ULM), ("now", "{}")],
    ),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>12<|"|>,days:3,hours:[6,18],unit:<|"|>7<|"|>,flag:true,more:<|"|>a "b" & {c}<|"|>}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        [("weather", TYPED), ("now", "{}")],
    ),
    (
        "gemma4",
        'Ja.<|tool_call>call:add{x:[null,-1.5,[],{<|"|>a b<|"|>:{y:<|"|>}]<|"|>}}],z:{}}<tool_call|>',
        ["Ja.", ("add", '{"x": [null, -1.5, [], {"a b": {"y": "}]"}}], "z": {}}')],
    ),
    ("gemma4", "<|tool_call>call:nothing{}", ["call:nothing{}"]),
    (
        "granite",
        f'<|tool_call|> [{{"name": "weather", "arguments": {ULM}}}, {{"arguments": {{}}, "name": "now"}}]',
        [("weather", ULM), ("now", "{}")],
    ),
    ("granite", f'Ja.\n<tool_call>[{{"name": "weather", "arguments": {ULM}}}]\nDone.', ["Ja.", ("weather", ULM), "Done."]),
    (
        "phi4_mini",
        f'Ja.<|tool_call|>[{{"name": "weather", "arguments": {ULM}}}, {{"name": "now", "arguments": {{}}}}]<|/tool_call|>',
        ["Ja.", ("weather", ULM), ("now", "{}")],
    ),
    *[
        (name, f"{begin}[{PYTHON_TYPES}, now()]{end}", [("weather", TYPED), ("now", "{}")])
        for name, begin, end in (
            ("pythonic", "", ""),
            ("llama4_pythonic", "", ""),
            ("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
            ("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
        )
    ],
    ("olmo3", f"Ja.\n<function_calls>\n{PYTHON_TYPES}\nnow()\n</function_calls>", ["Ja.", ("weather", TYPED), ("now", "{}")]),
    (
        "pythonic",
        "[add(x=[None, (1, 2.5e3), 'Zo\\xeb \\u00e9\\n\\'', False,], z={'a b': {}, \"c\": 'd'})]",
        [("add", '{"x": [null, [1, 2.5e3], "Zoë \\u00e9\\n\'", false], "z": {"a b": {}, "c": "d"}}')],
    ),
    ("harmony", f"{CHANNEL} to=functions.weather <|constrain|>json<|message|>{ULM}<|call|>", [("weather", ULM)]),
    ("harmony", f" to=functions.add<|channel|>commentary json<|message|>{NESTED}", [("add", NESTED)]),
    (
        "harmony",
        f"{CHANNEL}<|message|>Let me look.<|end|><|start|>assistant{CHANNEL} to=weather<|message|> {ULM} <|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
        ["Let me look.", ("weather", ULM), ("now", "{}")],
    ),
    ("harmony", "<|start|>assistant<|channel|>final<|message|>to=weather {}<|return|>", ["to=weather {}"]),
    ("harmony", f"{CHANNEL} to=functions.nothing <|constrain|>json<|message|>{{}}<|call|>", ["{}"]),
    ("harmony", f"{CHANNEL} to=functions.weather code<|message|>look()<|call|>", ["look()"]),
    ("harmony", "A text without a header to=functions.weather", None),
    ("pythonic", "[nothing(), 1] and [weather] are text", None),
    ("pythonic", "[weather (today)] is text", None),
    ("pythonic", f'[{{"name": "weather", "arguments": {ULM}}}]', [("weather", ULM)]),
    ("json", f' {{"name": "weather", "arguments": {ULM}}}\n', [("weather", ULM)]),
    ("json", f'```json\n{{"name": "weather", "arguments": {ULM}}}\n```', [("weather", ULM)]),
    (
        "json",
        f'So:\n```\n[{{"name": "weather", "arguments": {ULM}}},\n {{"name": "add", "parameters": {NESTED}}}]\n```\nDone.',
        ["So:", ("weather", ULM), ("add", NESTED), "Done."],
    ),
    ("json", "```json\n[1, 2]\n```\n```python\nprint()\n```  \n", None),
    ("json", f'[{{"name": "weather", "arguments": {ULM}}}, 3]', [("weather", ULM), ", 3]"]),
    ("json", '{"name": "weather", "arguments": "Ulm"}', None),
]


def parser(name: str, reasoning: str | None = None, inside: bool = False, **tools: Any) -> AnswerParser:
    syntax = SYNTAXES[name]
    texts = name == "hermes" or syntax.arguments in (QWEN, SEED, GLM, PYTHON)
    hidden = [] if texts else [one for one in syntax.markers if one[0] in "<["]  # as in these families' vocabularies
    hidden += ["[THINK]", "[/THINK]"] if reasoning == "mistral" else []
    made = Tools(syntax, NAMES, schemas=SCHEMAS, **tools)
    return answer_parser(REASONING[reasoning] if reasoning else None, inside, made, frozenset(hidden))


def joined(parser: AnswerParser, pieces: Sequence[str]) -> list[Part]:
    """The parts of an answer that comes in pieces; calls without their ids, which are random."""
    found = PartList()
    for i, piece in enumerate(pieces):
        for part in parser.push(piece, i == len(pieces) - 1):
            assert isinstance(part, Call) or part.text
            found.add(replace(part, id="") if isinstance(part, Call) else part)
    return found.joined()


def expected(parts: Sequence[Any]) -> list[Part]:
    made: list[Part] = []
    for part in parts:
        made += [Text(part)] if isinstance(part, str) else [Call("", part[0]), Arguments(part[1])]
    return made


def cuts(text: str) -> list[list[str]]:
    """Ways to cut a text: not at all, into characters, and at random."""
    ways = [[text], [*text, ""]]
    for _ in range(8):
        at = sorted(random.choices(range(len(text) + 1), k=random.randint(1, 6)))
        ways.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_calls_however_they_are_cut(name: str, text: str, parts: list[Any] | None) -> None:
    parts = [text] if parts is None else parts
    called = any(not isinstance(part, str) for part in parts)
    for pieces in cuts(text):
        reader = parser(name)
        assert joined(reader, pieces) == expected(parts) and reader.complete == called
    first = parser(name, parallel=False)
    kept = joined(first, [text])
    assert sum(isinstance(part, Call) for part in kept) == called == first.complete
    if parts == [text]:
        assert kept == [Text(text)]


THOUGHT = "Hm, <b>27</b> + 48?\n\nIt is 75."


@pytest.mark.parametrize("name", [name for name in REASONING if name != "harmony"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("repeated", [False, True], ids=["", "starts"])
def test_reasoning_however_it_is_cut(name: str, inside: bool, repeated: bool) -> None:
    start, end = REASONING[name].start, REASONING[name].end
    begin = f"{start}\n" * (repeated or not inside)
    call = f'<tool_call>\n{{"name": "weather", "arguments": {ULM}}}\n</tool_call>'
    for tail, parts in ((f"75. {end[:3]}", [f"75. {end[:3]}"]), (call, [("weather", ULM)]), ("", [])):
        for pieces in cuts(f"{begin}{THOUGHT}\n{end}\n\n{tail}"):
            reader = parser("hermes", name, inside)
            assert joined(reader, pieces) == [Reasoning(THOUGHT), *expected(parts)]
            assert reader.reasoned == len(f"{begin}{THOUGHT}\n{end}")
    for pieces in cuts(f"{begin}{THOUGHT}"):
        reader = parser("hermes", name, inside)
        assert joined(reader, pieces) == [Reasoning(THOUGHT)] and reader.reasoned is None
    assert joined(parser("hermes", name), [f" A {start} in the middle{end}"]) == [
        Text(f" A {start} in the middle{end}" if name != "mistral" else " A  in the middle")
    ]


def test_a_template_tells_the_marks_of_seed_oss() -> None:
    template = "{{ '<seed:think>' + m.reasoning_content + '</seed:think>' }}" + template_of(*WRITTEN["seed_oss"])
    alone = answer_parser(reasoning_of(template), False, None, frozenset())
    assert joined(alone, ["<seed:think>\nHm.\n</seed:think>\nYes."]) == [Reasoning("Hm."), Text("Yes.")]


def test_harmony_s_messages_however_they_are_cut() -> None:
    """Reasoning and text may come in several messages, and a message may be cut off."""
    thoughts = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{CHANNEL}<|message|>So:<|end|>"
    thoughts += "<|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
    final = "<|start|>assistant<|channel|>final <|constrain|>json<|message|>"
    call = f"<|start|>assistant{CHANNEL} to=functions.weather <|constrain|>json<|message|>"
    parts = [Reasoning(THOUGHT), Text("So:"), Reasoning("\n\nMore.")]
    for text, found, complete in (
        (f"{final}7 5<|return|>", [Text("\n\n7 5")], False),
        (f"{call}{ULM}<|call|>", expected([("weather", ULM)]), True),
        (f"{call}{ULM[:5]}", expected([("weather", ULM[:5])]), False),
        (call, [], False),
        (final[:-4], [], False),
    ):
        for pieces in cuts(thoughts + text):
            reader = parser("harmony", "harmony")
            assert joined(reader, pieces) == [*parts, *found]
            assert (reader.complete, reader.reasoned) == (complete, len(thoughts))
    alone = answer_parser(REASONING["harmony"], False, None, frozenset())
    assert joined(alone, [thoughts]) == parts, "without tools"
    for pieces in cuts(thoughts.removesuffix("<|end|>")):
        assert joined(reader := parser("harmony", "harmony"), pieces) == parts and reader.reasoned is None


def texts_behind_a_call(parts: Sequence[Part]) -> str:
    calls = [i for i, part in enumerate(parts) if isinstance(part, Call)]
    return "".join(part.text for part in parts[calls[0] if calls else len(parts) :] if isinstance(part, Text))


@pytest.mark.parametrize(("name", "text", "parts"), [case for case in CASES if case[2]])
def test_a_cut_off_call_has_the_arguments_as_far_as_they_came(name: str, text: str, parts: list[Any]) -> None:
    """At every place: the parts are a beginning of the whole's, and only what is complete counts as complete. The text behind a
    call is what it will be, too, or the beginning of a marker."""
    whole = [part for part in expected(parts) if not isinstance(part, Text)]
    texts = texts_behind_a_call(expected(parts))
    for end in range(len(text)):
        reader = parser(name)
        found = joined(reader, [*text[:end], ""])
        calls = [part for part in found if not isinstance(part, Text)]
        assert len(calls) <= len(whole)
        for got, want in zip(calls[:-1], whole, strict=False):
            assert got == want
        if calls:
            last = whole[len(calls) - 1]
            assert calls[-1] == last or (isinstance(last, Arguments) and str(last.text).startswith(calls[-1].text))  # type: ignore[union-attr]
            behind = texts_behind_a_call(found)
            assert any(one.startswith(behind) for one in (texts, *SYNTAXES[name].markers)), behind
        arguments = [part.text for part in calls if isinstance(part, Arguments)]
        if reader.complete:
            assert arguments and all(isinstance(json.loads(one), dict) for one in arguments)


def test_a_forced_call_names_its_tool_even_if_it_is_cut_off() -> None:
    for text, arguments in (("", []), ('{"na', []), ('{"name": "weather", "arguments": {"a', ['{"a'])):
        reader = parser("hermes", forced=True, forced_name="weather")
        assert joined(reader, [*text, ""]) == [Call("", "weather"), *map(Arguments, arguments)]
        assert not reader.complete


ATOMS = [
    *["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```json\n", "```", "<think>", "</think>"],
    *['{"name": "weather", "arguments": ', '{"name": "add", "parameters": ', '{"arguments": {}, "name": "now"', '{"type": "function", '],
    *[ULM, NESTED, "{}", "{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n", "weather", '"name"', '"nothing"', "<", "Text é 🐉"],
]  # fmt: skip


def test_nearly_right_answers_lose_nothing_and_do_not_depend_on_how_they_are_cut() -> None:
    """Without hidden markers, text, names and arguments are in the answer, in their order; and all else there is syntax."""
    # a fence that closes calls may end in front of "json"
    markers = r"\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]|<\|python_tag\|>|</?tool_call>|</?think>|```|json"
    syntax = re.compile(markers + r'|"(name|arguments|parameters|type|function)"|[\s{}\[\]":,;]')
    further = r"[,;}\]]\s*\{|<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>"
    for _ in range(600):
        name, inside = random.choice([*SYNTAXES]), random.random() < 0.3
        text = "".join(random.choices(ATOMS, k=random.randint(1, 14)))
        tools = Tools(SYNTAXES[name], NAMES)
        results = []
        for pieces in cuts(text)[:4]:
            found = joined(AnswerParser(REASONING["think"], inside, tools, frozenset()), pieces)
            results.append(found)
        assert all(one == results[0] for one in results), text
        if "```weather" in text:
            continue  # a word behind a fence is its language if the fence opens calls, and text if it closes them
        if '"arguments": {}, "name"' in text or any(isinstance(one, Call) for one in results[0][-1:]):
            continue  # arguments in front of the name; a call that is cut off in front of its arguments
        if SYNTAXES[name].arguments and any(isinstance(one, Arguments) for one in results[0]):
            continue  # arguments that were no JSON
        # A space between two parts, so that their ends together are no marker.
        answer = " ".join(part.name if isinstance(part, Call) else part.text for part in results[0])
        read, whole = syntax.sub("", answer), syntax.sub("", text)
        if re.search(further, text) and any(isinstance(one, Arguments) for one in results[0][-1:]):
            whole = whole[: len(read)]  # a further call that is cut off is no text
        assert read == whole, (text, results[0])


STARTS = "", "<tool_call>", "[TOOL_CALLS]", '{"name": "weather", "arguments": {', '{"type": "', '{"arguments": {"', "```", "["
REPEATED = [*' \n<a"\\[{', "{}", "```", "<tool_call>", "[TOOL_CALLS]", "</think", "<tool_cal"]


@pytest.mark.parametrize("name", SYNTAXES)
def test_the_work_is_linear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one repeated text, a character at a time: twice the length takes at most about twice the work, which is
    counted in characters that are copied or searched."""
    work = 0
    feed = Reader.feed

    def counted(self: Reader, text: str, final: bool) -> None:
        nonlocal work
        feed(self, text, final)
        work += len(self._text)  # each piece is searched together with what is left of earlier ones

    monkeypatch.setattr(Reader, "feed", counted)
    for start, repeated in product(STARTS, REPEATED):
        text = start + repeated * (200 // len(repeated))
        work = 0
        joined(AnswerParser(REASONING["think"], False, Tools(SYNTAXES[name], NAMES), frozenset()), [*text, ""])
        assert work < 16 * len(text), (start, repeated)


GIVEN = "{{ f.arguments | tojson }}"
OBJECT = f'{{"name": "{{{{ f.name }}}}", "arguments": {GIVEN}}}'
SPELLED = "{{ v if v is string else v | tojson }}"
PYTHON_CALL = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v if v is boolean else v | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %})"
)
# how templates write calls: what is around all, each, and what is between two
WRITTEN: dict[str, tuple[str, str, str, str]] = {
    "hermes": ("", f"<tool_call>\n{OBJECT}\n</tool_call>", "\n", ""),
    "llama3_json": ("", f'{{"name": "{{{{ f.name }}}}", "parameters": {GIVEN}}}', "; ", ""),
    "mistral": ("", f"[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{GIVEN}", "", ""),
    "mistral_list": ("[TOOL_CALLS] [", OBJECT, ", ", "]"),
    "json": ("", OBJECT, "\n", ""),
    "qwen3_coder": (
        "",
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        f"{SPELLED}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>",
        "\n",
        "",
    ),
    "seed_oss": (
        "",
        "<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>"
        f"{SPELLED}</parameter>\n{{% endfor %}}</function>\n</seed:tool_call>",
        "\n",
        "",
    ),
    "glm45": (
        "",
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        f"<arg_value>{SPELLED}</arg_value>\n{{% endfor %}}</tool_call>",
        "\n",
        "",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>{{{{ c.id }}}}{TO_ARGUMENTS}{GIVEN}<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v3": (BEGIN, f"{CALL}{{{{ c.type }}}}{SEPARATOR}{{{{ f.name }}}}\n```json\n{GIVEN}\n```{END}", "\n", CLOSE),
    "deepseek_v31": (BEGIN, f"{CALL}{{{{ f.name }}}}{SEPARATOR}{GIVEN}{END}", "", CLOSE),
    "gemma4": (
        "",
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:"
        "{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}{{ '' if loop.last else ',' }}{% endfor %}}<tool_call|>",
        "",
        "",
    ),
    "granite": ("<|tool_call|>[", OBJECT, ", ", "]"),
    "phi4_mini": ("{# <|tool|>…<|/tool|> #}<|tool_call|>[", OBJECT, ", ", "]<|/tool_call|>"),
    "olmo3": ("<function_calls>", PYTHON_CALL, "\n", "</function_calls>"),
    "lfm2": ("<|tool_call_start|>[", PYTHON_CALL, ", ", "]<|tool_call_end|>"),
    "llama4_pythonic": ("<|python_start|>[", PYTHON_CALL, ", ", "]<|python_end|>"),
    "pythonic": ("{# [func_name1(…)] #}[", PYTHON_CALL, ", ", "]"),
}


def template_of(begin: str, call: str, between: str, end: str) -> str:
    """A chat template with a ¦ around an answer's calls."""
    calls = (
        f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{{{ '' if loop.last else {between!r} }}}}{{% endfor %}}"
    )
    other = "[{{ m.role }}] {{ m.content }}\n"
    return (
        f"{{% for m in messages %}}{{% if m.tool_calls %}}¦{begin}{calls}{end}¦{{% else %}}{other}{{% endif %}}{{% endfor %}}"
    )


def rendered(template: str, asked: list[tuple[str, str]]) -> str:
    """Calls, as the template writes them. asked: names and arguments, as JSON."""
    calls: list[Any] = [
        {"id": f"functions.{function}:{i}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for i, (function, arguments) in enumerate(asked)
    ]
    given = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": calls}]
    given += [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
    return TOKENIZER.render_chat(given, chat_template=template).split("¦")[1]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_returned_is_taken_back(name: str) -> None:
    """The template tells the form of calls, writes those of an earlier answer in it, and the parser reads the same."""
    template = template_of(*WRITTEN[name])
    assert syntax_of(template) == name
    typed = json.loads(TYPED.replace('\\"b\\" & ', "")) | {"hours": [6, 18]}
    asked = [("weather", json.dumps(typed)), ("now", "{}")]
    text = rendered(template, asked)
    reader = parser(name)
    found = joined(reader, [text])
    assert [part.name for part in found if isinstance(part, Call)] == ["weather", "now"]
    assert [json.loads(part.text) for part in found if isinstance(part, Arguments)] == [typed, {}]
    assert reader.complete and len(found) == 4, found


# what templates of families have whose calls have other forms: no form here reads them
FOREIGN = {
    "MiniMax-M2": '{%- set begin = "<minimax:tool_call>" -%}<invoke name="{{ name }}"><parameter name="a">',
    "DeepSeek-V3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ name }}">',
    "Kimi-K3": "{{ '<|open|>' + tag }}{{ '<|close|>' + tag }}",
    "Command-R": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ name }}", "parameters": {}}]<|END_ACTION|>',
    "Command-R+": 'Action: ```json\n[{"tool_name": "{{ name }}", "parameters": {}}]```',
    "Nemotron": '<TOOLCALL>[{"name": "{{ name }}", "arguments": {}}]</TOOLCALL>',
    "Hunyuan": '<tool_calls>[{"name": "{{ name }}", "arguments": {}}]</tool_calls>',
    "GigaChat3": "{{ write({'role': 'function call', 'content': call}) }}",
    "functionary": "<function={{ name }}>{}</function>",
}


def test_a_template_may_tell_a_form_late_or_none() -> None:
    assert {name for name, template in FOREIGN.items() if syntax_of(template) is not None} == set()
    assert syntax_of("{{ messages[0].content }}") == "json" and syntax_of("{{ '<|python_tag|>' }}") == "llama3_json"
    assert syntax_of("List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>") == "lfm2"
    assert syntax_of("<|im_system|>tool_declare<|im_middle|>{{ tools }}<|im_end|>") == "kimi_k2"


@pytest.mark.parametrize("name", ["MiniMax-M2", "Command-R"])
def test_calls_of_an_unknown_form_stay_text(
    name: str, make_site: Callable[..., Site], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so. A forced call is JSON by its grammar, and read as such."""
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{# tool_calls #}" + FOREIGN[name])
    with caplog.at_level("WARNING"):
        site = make_site(chat_template=str(tmp_path / "template"))
    assert sum("a form that this server does not know" in record.getMessage() for record in caplog.records) == 1
    text = f'{{"name": "weather", "arguments": {ULM}}}'
    for forced in (False, True):
        whole, _ = answers(site, text, tools=[TOOL], tool_choice="required" if forced else "auto")
        message = whole["choices"][0]["message"]
        assert (message["content"], bool(message.get("tool_calls"))) == ((None, True) if forced else (text, False))
        assert bool(site.last().params.grammar) == forced


# --- over HTTP -----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}</think><tool_call>{% endfor %}{{ reasoning_effort }}"
    "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("thinking")
    (folder / "template").write_text(TEMPLATE)
    site = Site(folder, chat_template=str(folder / "template")).start()
    yield site
    site.close()


def answers(site: Site, text: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer to a chat, and the chunks of its stream."""
    site.engine.reply = lambda submit: [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    site.engine.group = random.choice([1, 3, 1000])
    body = {"max_completion_tokens": 110, "return_token_ids": True, "logprobs": True} | body
    events = site.events("/v1/chat/completions", {**CHAT, **body, "stream_options": {"include_usage": True}})
    whole = site.chat(**body)
    replies.ChatReply.model_validate(whole)
    assert all(replies.ChatChunk.model_validate(event) for event in events)
    return whole, events


def merged(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice of a stream's chunks, laid out as that of a whole answer."""
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    ids, logprobs, last = [], [], {}
    for (last,) in (event["choices"] for event in events if event["choices"]):
        for name in ("content", "reasoning_content"):
            if last["delta"].get(name):
                message[name] = (message[name] or "") + last["delta"][name]
        for call in last["delta"].get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        ids += last.get("token_ids", [])
        logprobs += (last["logprobs"] or {}).get("content", [])
    assert last["delta"] == {}
    return {**message, "finish_reason": last["finish_reason"], "token_ids": ids, "logprobs": logprobs}


@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("shown", [True, False])
def test_a_stream_has_what_the_whole_answer_has(thinking: Site, effort: str, shown: bool) -> None:
    thought = "Hm, Zoë?\n</think>\n\n" if effort == "high" else ""
    call = f'<tool_call>\n{{"name": "weather", "arguments": {ULM}}}\n</tool_call>'
    text = f"{thought}Let me look.\n{call}\n{call}"
    body = {"tools": [TOOL], "reasoning_effort": effort, "include_reasoning": shown, "max_completion_tokens": 180}
    whole, events = answers(thinking, text, **body)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert message["content"] == "Let me look." and choice["finish_reason"] == "tool_calls"
    assert message.get("reasoning_content") == ("Hm, Zoë?" if thought and shown else None)
    assert [one["function"] for one in message["tool_calls"]] == 2 * [{"name": "weather", "arguments": ULM}]
    stream = merged(events)
    assert stream == {
        "content": message["content"],
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [one["function"] for one in message["tool_calls"]],
        "finish_reason": choice["finish_reason"],
        "token_ids": choice["token_ids"],
        "logprobs": choice["logprobs"]["content"],
    }
    prompt = TOKENIZER.decode(thinking.last().prompt_ids)
    assert effort in prompt and prompt.rstrip().endswith("<think>" if thought else "</think>")
    details = whole["usage"]["completion_tokens_details"]
    assert details == events[-1]["usage"]["completion_tokens_details"]
    count = details["reasoning_tokens"]
    begins = [len(TOKENIZER.decode(choice["token_ids"][:n])) for n in range(len(choice["token_ids"]))]
    assert count == sum(begin < len(thought.rstrip("\n")) for begin in begins) and bool(count) == bool(thought)


@pytest.mark.parametrize("shown", [True, False])
def test_an_answer_that_ends_in_its_reasoning_can_be_sent_back(thinking: Site, shown: bool) -> None:
    whole, _ = answers(thinking, "Hm, Zoë?", include_reasoning=shown)
    message = whole["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (None, "Hm, Zoë?" if shown else None)
    for kept in (message, {"role": "assistant", "content": message["content"]}):
        thinking.chat(messages=[*CHAT["messages"], kept, *CHAT["messages"]])


@pytest.mark.parametrize(("name", "found"), [("deepseek_r1", True), ("think", False)])
def test_reasoning_that_neither_model_nor_template_begins(make_site: Callable[..., Site], name: str, found: bool) -> None:
    """deepseek_r1 takes it for reasoning, and a grammar begins behind it; think does not."""
    site = make_site(reasoning_parser=name)
    rest = "Hm.\n</think>\n\n75"
    for text, parts in ((rest, ("Hm.", "75") if found else (None, rest)), (f"<think>\n{rest}", ("Hm.", "75"))):
        whole, events = answers(site, text)
        message = whole["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == parts
        assert (merged(events)["reasoning_content"], merged(events)["content"]) == parts
    turns = [*CHAT["messages"], {"role": "assistant", "content": "It is "}]
    site.engine.reply = lambda submit: [*TOKENIZER.encode("75", add_special_tokens=False), EOS]
    assert site.chat(messages=turns, continue_final_message=True)["choices"][0]["message"]["content"] == "75"
    turns[-1]["content"] = "<think>Hm"
    site.says(".</think>75")
    message = site.chat(messages=turns, continue_final_message=True)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (".", "75"), "the answer goes on inside the reasoning"
    site.chat(response_format={"type": "json_object"}, max_tokens=1)
    grammar = site.last().params.grammar or ""
    assert accepts(grammar, '{"a": 1}') != found and accepts(grammar, 'Hm</think>{"a": 1}') == found
    assert accepts(grammar, '<think>Hm</think>{"a": 1}')


def test_a_budget_of_reasoning_reaches_the_engine(thinking: Site, make_site: Callable[..., Site]) -> None:
    """With how the answer begins: the prompt may have begun the reasoning. Messages have the budget where it has an effect."""
    end = TOKENIZER.encode("</think>", add_special_tokens=False)
    inside, before = (partial(ThinkingBudget, start=start, end="</think>", end_ids=end) for start in ("", "<think>"))
    thinking.chat(thinking_token_budget=5, n=2)
    assert thinking.last().params.thinking == inside(5)
    for body in ({}, {"thinking_token_budget": 5, "chat_template_kwargs": {"enable_thinking": False}}):
        thinking.chat(**body)
        assert thinking.last().params.thinking is None
    site = make_site(reasoning_parser="think")
    site.chat(thinking_token_budget=0)
    assert site.last().params.thinking == before(0)
    site.close()
    prompts = ["Hm <think> so", "Hm", "<think>so</think>"]
    thinking.post("/v1/completions", {"prompt": prompts, "thinking_token_budget": 7})
    found = [submit.params.thinking for submit in thinking.engine.submits[-3:]]
    assert found == [inside(7), before(7), None]
    thinking.post("/v1/responses", {"input": "Hi", "thinking_token_budget": 9})
    assert thinking.last().params.thinking == inside(9)
    site = make_site(reasoning_parser="none")
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
        error = site.refused(path, {**body, "thinking_token_budget": 5})
        assert error["param"] == "thinking_token_budget" and "marks no reasoning" in error["message"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "pick_template", Mock(side_effect=UserError("it has no template")))
        error = thinking.refused("/v1/completions", {"prompt": "a", "thinking_token_budget": 5})
    assert error["param"] == "thinking_token_budget"
    asked = {**CHAT, "max_tokens": 2, "tools": [{"name": "a", "input_schema": {"type": "object"}}]}
    for one, budget in ((thinking, inside(2000)), (site, None)):
        one.post("/v1/messages", {**asked, "thinking": {"type": "enabled", "budget_tokens": 2000}})
        assert one.last().params.thinking == budget


def test_a_constraint_begins_after_the_reasoning(thinking: Site) -> None:
    """The prompt ends inside the reasoning, which stays free."""
    text = 'It wants JSON.</think>{"a": 1}'
    whole, events = answers(thinking, text, response_format={"type": "json_object"}, reasoning_effort="high")
    message = whole["choices"][0]["message"]
    assert message["content"] == merged(events)["content"] == '{"a": 1}'
    assert message["reasoning_content"] == merged(events)["reasoning_content"] == "It wants JSON."


def test_markers_that_are_special_tokens_reach_the_parser_and_no_client(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    special, other = (TOKENIZER.token_text(i) for i in sorted(TOKENIZER.special_ids - {EOS})[:2])
    monkeypatch.setitem(call_syntax.SYNTAXES, "llama3_json", replace(call_syntax.LLAMA, trigger=special))
    site = make_site(tool_parser="llama3_json")
    call = f'{{"name": "weather", "parameters": {ULM}}}'
    for text, content, calls in ((call, None, [{"name": "weather", "arguments": ULM}]), ("print()", "print()", [])):
        whole, events = answers(site, special + text + other, tools=[TOOL])
        message = whole["choices"][0]["message"]
        assert message["content"] == merged(events)["content"] == content
        assert [one["function"] for one in message.get("tool_calls", [])] == merged(events)["tool_calls"] == calls

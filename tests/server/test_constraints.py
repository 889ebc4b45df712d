"""What requests demand of their answers: formats, calls as models write them, either of both, free text with tags.

Random logits write the answers, and `re`, `jsonschema`, `ast` and plain loops check them.
"""

import ast
import asyncio
import contextlib
import json
import random
import re
import string
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.calls.parser import AnswerParser, Arguments, Call, PartList, Reasoning, Text, Tools
from engine.calls.syntax import HERMES, JSON, LLAMA, PYTHON, SYNTAXES, CallSyntax, Marks
from engine.calls.values import types_of
from engine.constrain.demand import Constraint, Demand, compile_demand
from engine.constrain.grammars import SchemaError
from engine.constrain.json_schema import CallableTool
from engine.thinking import ReasoningSyntax
from server.calls import BRIEF_SECONDS, demand_of
from server.errors import ApiError
from server.generation import make_params
from server.schemas import ChatBody
from server.workers import Workers
from tests.server.test_parsers import CASES, SCHEMAS, ULM, WRITTEN, rendered, tagged, template_of
from tests.server.test_schemas import random_leaf, random_schema
from tests.support.constrained import VOCAB, accepts, grammars, write
from tests.support.server_thread import CHAT, TOKENIZER, TOOL, Site, wait_for
from tests.support.worker_jobs import until_there

SYSTEM = TOKENIZER.token_text(4)  # a special token
SPECIAL = CallSyntax(SYSTEM)  # the token and an object
THINK = Marks("<think>", "</think>", begins_inside=False)
INSIDE = Marks("<think>", "</think>", begins_inside=True)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [CallableTool(0, "weather", CITY, True), CallableTool(2, "now", None, False)]
PERSON = Constraint("json", {"type": "object", "properties": {"name": {"enum": ["A", "B"]}}, "required": ["name"]}, "x")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site")).start()
    yield site
    site.close()


def grammar_of(site: Site, **asked: Any) -> str:
    site.complete(max_tokens=1, **asked)
    return site.last().params.grammar or ""


# --- formats -----------------------------------------------------------------------------------------------------------------


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A regular expression that means the same to `re` and to the library."""
    if not depth:
        return rng.choice([re.escape(rng.choice("ab/ \"'.é\n")), "[a-f]", "[^x-z]", "[0-9]{1,2}"])
    one, two = random_regex(rng, depth - 1), random_regex(rng, depth - 1)
    return rng.choice([f"{one}{two}", f"(?:{one}|{two})", f"(?:{one}){{1,3}}", f"(?:{one})?{two}"])


def test_regexes_and_choices_are_kept(site: Site, seed: int) -> None:
    rng = random.Random(seed)
    for name in ("guided_", "structured_outputs"):
        regex = random_regex(rng)
        texts = ["".join(rng.choices('ab\\"/\n 😀é\x7f\x85\x00', k=rng.randint(1, 4))) for _ in range(5)]
        for kind, value in (("regex", regex), ("regex", f"^{regex}$"), ("choice", texts)):
            asked = {name + kind: value} if name == "guided_" else {name: {kind: value}}
            grammar = grammar_of(site, **asked)
            for _ in range(3):
                text = write(grammar)
                assert re.fullmatch(regex, text) if kind == "regex" else text in texts, (value, text)


ARITHMETIC = """
// an expression
?start: sum
sum: term (("+" | "-") term)~0..2
term: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
GBNF = """
# an expression
root ::= term (("+" | "-") term){0,2}
term ::= num-ber | "(" root ")"
num-ber ::= [1-9] [0-9]{0,2}
"""


@pytest.mark.parametrize("grammar", [ARITHMETIC, GBNF], ids=["Lark", "GBNF"])
def test_grammars_are_kept(site: Site, grammar: str, seed: int) -> None:
    found = grammar_of(site, structured_outputs={"grammar": grammar})
    assert accepts(found, "1+(23-4)") and not accepts(found, "1+(23-4") and not accepts(found, "01")
    for _ in range(3):
        tree = ast.parse(write(found, likelier=")"), mode="eval")
        assert all(isinstance(node, ast.Constant | ast.BinOp | ast.Expression | ast.operator) for node in ast.walk(tree))


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"json": CITY}},
        {"structured_outputs": {"json": json.dumps(CITY)}},
        {"guided_json": CITY, "guided_decoding_backend": "outlines"},
        {"response_format": {"type": "json_object", "schema": CITY}},
        {"structured_outputs": {"json": CITY, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": CITY, "whitespace_pattern": "\\t?"}},
    ],
    ids=str,
)
def test_json_is_kept(site: Site, asked: dict[str, Any], seed: int) -> None:
    grammar = grammar_of(site, **asked)
    for _ in range(3):
        jsonschema.validate(json.loads(write(grammar)), CITY)
    between = "" if "disable_any" in str(asked) else "\t" if "whitespace_pattern" in str(asked) else " "
    for space in ("", " ", "\t"):
        assert accepts(grammar, f'{{"city":{space}"Ulm"}}') == (space in ("", between))


def test_any_object(site: Site) -> None:
    for form in ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object", "schema": {}}}):
        grammar = grammar_of(site, **form)
        assert accepts(grammar, '{"a": [1]}') and not accepts(grammar, "[1]")


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "(" * 3000 + "a" + ")" * 3000},
        {"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
        {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
        {"grammar": "start: X\n" + "\n".join(f"X{i}: X{i + 1} X{i + 1}" for i in range(60)) + '\nX60: "a"\nX: X0'},
        {"choice": ["x" * 300 + str(i) for i in range(4000)]},
        {"choice": ["x" * 900_000]},
        {"regex": "((a{1000}){1000}){1000}"},
        {"grammar": "start: x0\n" + "\n".join(f'x{i}: "a" | x{i + 1}' for i in range(9000)) + '\nx9000: "b"'},
        {"grammar": "start: /[a-z]{6}/ (" + " | ".join(f'"a" /{i % 50}[a-z]/' for i in range(6000)) + ")"},
        {
            "grammar": "start: "
            + " | ".join(f'"a" X{i}' for i in range(9000))
            + "\n"
            + "\n".join(f'X{i}: "{i}"' for i in range(9000))
        },
        {"regex": "\ud800"},
        {"choice": ["\ud800"]},
        {"grammar": 'start: "\ud800"'},
        {"grammar": 'root ::= "\ud800"'},
    ],
    ids=lambda one: ascii(one)[:40],
)
def test_hostile_constraints_are_refused(site: Site, structured: dict[str, Any]) -> None:
    (param,) = structured
    start = time.monotonic()
    body = json.dumps({"prompt": "x", "structured_outputs": structured})  # httpx itself would not send half of a character
    answer = site.http.post("/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == 400 and time.monotonic() - start < 60, answer.text[:300]
    assert (answer.json()["error"]["param"] or "").removesuffix(".0") in (f"structured_outputs.{param}", "")
    assert site.health() == "ready"


def test_many_choices_are_one_item_of_the_parser(site: Site) -> None:
    texts = [f"{i} {''.join(random.choices(string.ascii_letters, k=10))}" for i in range(8000)]
    assert write(grammar_of(site, guided_choice=texts)) in texts


# --- calls -------------------------------------------------------------------------------------------------------------------


def calls_in(text: str) -> list[str]:
    """The calls that a Hermes answer has, each checked. Returns their names."""
    schemas = {tool.name: tool.schema for tool in TOOLS}
    found = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    for call in map(json.loads, found):
        jsonschema.validate(call["arguments"], {**schemas[call["name"]], "additionalProperties": False})
        assert list(call) == ["name", "arguments"]
    return found


def written(syntax: CallSyntax, name: str, arguments: str) -> str:
    """A call, as chat templates of the syntax's family write it. arguments: JSON of texts and numbers."""
    family = next((name for name, one in SYNTAXES.items() if one == syntax), None)
    if family is None:
        return f'{syntax.trigger}{{"name": "{name}", "{syntax.key}": {arguments}}}'
    trigger = syntax.trigger if family == "llama3_json" else ""
    return trigger + rendered(template_of(*WRITTEN[family]), [(name, arguments)])


def test_either_calls_or_a_format(seed: int) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    either = compile_demand(Demand(PERSON, TOOLS, syntax=HERMES)).grammar
    assert accepts(either, call) and accepts(either, f"{call}\n{call}") and accepts(either, '{"name": "A"}')
    for text in ("Hello", f'{call}{{"name": "A"}}', '{"name": "now", "arguments": {}}', f"{call}\n", '{"name": "C"}'):
        assert not accepts(either, text), text
    assert len(calls_in(write(either, begin="<", until="</tool_call>"))) == 1
    tag, bare = LLAMA.trigger, '{"name": "now", "parameters": {}}'
    chain = compile_demand(Demand(PERSON, TOOLS, syntax=LLAMA)).grammar
    assert accepts(chain, f"{tag}{bare}; {bare}") and not accepts(chain, f"{tag}{bare}\n{tag}{bare}")
    must = compile_demand(Demand(tools=TOOLS, calls="must", syntax=HERMES)).grammar
    assert accepts(must, call) and not accepts(must, "Hello") and not accepts(must, f"{call}\n{call}")
    single = compile_demand(Demand(PERSON, TOOLS, several=False, syntax=HERMES)).grammar
    assert accepts(single, call) and not accepts(single, f"{call}\n{call}")


@pytest.mark.parametrize(
    "form",
    [
        Constraint("regex", "AB|C", "x"),
        Constraint("choice", ["AB", "C"], "x"),
        Constraint("grammar", 'start: "AB" | "C"', "x"),
        Constraint("grammar", 'root ::= "AB" | "C"', "x"),
    ],
    ids=["regex", "choice", "Lark", "GBNF"],
)
def test_every_constraint_goes_with_tools_and_reasoning(form: Constraint) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for tools in ([], TOOLS):
        for marks, before in ((None, ""), (THINK, ""), (THINK, "<think>so</think>\n"), (INSIDE, "so</think>")):
            grammar = compile_demand(Demand(form, tools, syntax=HERMES, reasoning=marks)).grammar
            for text in ("AB", "C", *[call] * bool(tools)):
                assert accepts(grammar, before + text), (text, marks)
            for text in ("A", "ABC", *[call] * (not tools)):
                assert not accepts(grammar, before + text), (text, marks)


@pytest.mark.parametrize("marks", [THINK, Marks(SYSTEM, TOKENIZER.token_text(3), begins_inside=False)], ids=["text", "special"])
@pytest.mark.parametrize("calls", ["may", "must"])
def test_spaces_before_reasoning_have_a_bound(marks: Marks, calls: Any) -> None:
    """A small model would otherwise fill the answer with them."""
    special = {marks.begin: 4, marks.end: 3} if marks is not THINK else {}
    demand = Demand(PERSON if calls == "may" else None, TOOLS, calls, syntax=HERMES, reasoning=marks, special=special)
    grammar = compile_demand(demand).grammar
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for spaces in ("", "\n", "\n\n"):
        assert accepts(grammar, f"{spaces}{marks.begin}so{marks.end}\n{call}")
    for spaces in ("\n\n\n", "\u2008"):
        assert not accepts(grammar, f"{spaces}{marks.begin}so{marks.end}\n{call}")


@pytest.mark.parametrize("form", [PERSON, Constraint("regex", "[A-Z]+", "x")], ids=["json", "regex"])
def test_either_a_plain_call_or_a_format(form: Constraint) -> None:
    """Without a syntax a call may begin as the format does."""
    either = compile_demand(Demand(form, TOOLS)).grammar
    assert accepts(either, '{"name": "now", "arguments": {}}') and accepts(
        either, '{"name": "weather", "arguments": {"city": "x"}}'
    )
    assert accepts(either, '{"name": "A"}' if form is PERSON else "AB")
    for text in (
        '{"name": "C"}',
        '{"name": "now"}',
        '{"name": "now", "arguments": {"x": 1}}',
        '{"name": "A", "arguments": {}}',
    ):
        assert not accepts(either, text), text


@pytest.mark.parametrize("syntax", [HERMES, SPECIAL], ids=["text", "special token"])
def test_calls_in_free_text_are_constrained(syntax: CallSyntax, seed: int) -> None:
    special = {SYSTEM: 4} if syntax is SPECIAL else {}
    free = compile_demand(Demand(tools=TOOLS, syntax=syntax, special=special)).grammar
    now = written(syntax, "now", "{}")
    for text in ("", "Hello {<tool", 'a "b" 😀\n', now, f"Sure: {now}", f"{now}\n\n{now} done", f"{now}{{"):
        assert accepts(free, text), text
    for text in (syntax.trigger, f"Hi {syntax.trigger}x", now.replace("now", "then"), now.replace("{}", '{"x": 1}')):
        assert not accepts(free, text), text
    begin = f"I say. {written(syntax, 'weather', ULM).partition(ULM)[0]}"
    arguments = write(free, begin=begin, until="}").removeprefix(begin)
    jsonschema.validate(json.loads(arguments), CITY)


UNUSUAL = '<tool_call>{"arguments"', '{"name": "now"}', '{"type"', '"name": "now"}]'
CALLED = [case for case in CASES if case[2] and not all(isinstance(part, str) for part in case[2])]


@pytest.mark.parametrize(("family", "text", "parts"), CALLED)
def test_calls_are_accepted_as_models_write_them(family: str, text: str, parts: list[Any]) -> None:
    """All calls that the parser finds; and none of them with other arguments or another tool's. Of what is no JSON, the parser reads
    more than the grammar lets a model write."""
    # a second call, behind the end of the first
    unlikely = {"python": "(1, 2.5e3)", "qwen3_coder": '{"name"', "harmony": "now"}
    if unlikely.get("python" if SYNTAXES[family].arguments is PYTHON else family, "\0") in text:
        return
    add = {"type": "object", "properties": {"x": {"type": "array"}, "z": {"type": "object"}}}
    tools = [*TOOLS, CallableTool(3, "add", add, False)]
    typed = SYNTAXES[family].arguments is not None
    if typed:
        tools[0] = CallableTool(0, "weather", {**SCHEMAS["weather"], "additionalProperties": True}, False)
    demand = Demand(tools=tools, syntax=SYNTAXES[family])
    accepted = [demand]
    # of forced calls the model chooses all of the text, so only what its family writes is allowed
    unusual = any(one in text for one in UNUSUAL) or (typed and '{"name"' in text)
    begins = text.startswith(
        (demand.syntax.section or ())[:1] or demand.syntax.trigger or ("[" if demand.syntax.arguments else "{")
    )
    if begins and not unusual and not any(isinstance(part, str) for part in parts):
        accepted += [demand._replace(constraint=PERSON)] + [demand._replace(calls="must")] * (len(parts) == 1)
    in_the_middle = family == "json" and isinstance(parts[0], str)  # of text, where nothing tells a call from it
    for one in accepted:
        grammar = compile_demand(one).grammar
        assert accepts(grammar, text), text
        for _, arguments in [part for part in parts if not isinstance(part, str)]:
            if typed:
                now = written(demand.syntax, "now", '{"y": 1}')
                assert not accepts(grammar, now), now
                continue
            for given in ('{"y": 1}', '"x"'):
                at = text.index(arguments) if arguments in text else text.index('"now"') + 5
                wrong = text[:at] + (
                    given + text[at + len(arguments) :] if arguments in text else f', "arguments": {given}' + text[at:]
                )
                assert accepts(grammar, wrong) == in_the_middle, wrong


@pytest.mark.parametrize("marks", [None, INSIDE, THINK], ids=["no reasoning", "inside", "optional"])
@pytest.mark.parametrize("syntax", [JSON, LLAMA], ids=["json", "llama"])
def test_plain_calls_in_free_text_are_those_at_its_start(syntax: CallSyntax, marks: Marks | None) -> None:
    grammar = compile_demand(Demand(tools=TOOLS, syntax=syntax, reasoning=marks)).grammar
    now, ulm = '{"name": "now", "arguments": {}}', '{"name": "weather", "parameters": {"city": "Ulm"}}'
    wrong = '{"name": "weather", "arguments": {"x": 1}}'
    begin = "" if marks is None else "So </think>" if marks.begins_inside else "<think>So </think>\n"
    for text in (
        *(
            "",
            "Hi",
            "{",
            "[1]",
            '{"name": "Ann"}',
            '{"name": "now"}',
            '{"name": "nowhere", "arguments": 1}',
            '{"arguments": 3}',
        ),
        *(now, ulm, f" {now}\nDone", f"```json\n{ulm}\n```\n{{", f"[{ulm}, {now}]", f"{ulm};{now}", f"{now}\n{ulm} {{"),
        *(f"Hi {wrong}", f"{now} Hi {wrong}", f'{now}, {{"name": "x"}}', '```\n{"name": "weather"'),
    ):
        assert accepts(grammar, begin + text), text
    for text in (
        wrong,
        f"\n\n{wrong}",
        f"```json\n{wrong}",
        f"[{wrong}",
        f"{now}; {wrong}",
        f"[{now}, {wrong}]",
        f"{now}\n{wrong}",
    ):
        assert not accepts(grammar, begin + text), text
    if syntax is LLAMA:
        tag = "<|python_tag|>"
        for text in (f"Hi {tag}{ulm}", f"{tag}{ulm}; {now}", f"{ulm} {tag}{now}", f'{{"name": "x"}} {tag}{now}'):
            assert accepts(grammar, begin + text), text
            assert not accepts(grammar, begin + text.replace("{}", '{"x": 1}').replace('"Ulm"', "3")), text
        assert not accepts(grammar, f"{begin}{tag}print()")


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral"])
def test_many_tools_stay_within_the_limits(family: str, seed: int) -> None:
    """The masks of a call of one of 128 tools with long names that begin alike."""
    rng, syntax = random.Random(seed), SYNTAXES[family]
    names = ["mcp__server__" + "".join(rng.choices(string.ascii_lowercase, k=40)) for _ in range(128)]
    tools = [
        CallableTool(i, name, {"properties": {f"p{i}_{j}": {"type": "integer"} for j in range(6)}}, False)
        for i, name in enumerate(names)
    ]
    at = rng.randrange(128)
    text = written(syntax, names[at], f'{{"p{at}_3": 7}}')
    for demand in (Demand(tools=tools, syntax=syntax), Demand(tools=tools, syntax=syntax, calls="must")):
        matcher = grammars().compile(compile_demand(demand).grammar)
        wrong = matcher.deep_copy()
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            matcher.compute_logit_bias()
            assert matcher.consume_token(token), matcher.get_error()
        ids = TOKENIZER.encode(text.replace("7", '"7"'), add_special_tokens=False)
        assert matcher.is_accepting() and wrong.try_consume_tokens(ids) < len(ids)


def test_reasoning_before_the_answer_is_free() -> None:
    thought, now = 'I {"think" <tool_call> so', '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    wrong = now.replace("now", "then")
    form = compile_demand(Demand(PERSON, reasoning=THINK)).grammar
    for text in ('{"name": "A"}', f'<think>{thought}</think>\n\n{{"name": "A"}}'):
        assert accepts(form, text), text
    assert not accepts(form, f"<think>{thought}</think>Hi") and not accepts(form, f'{thought}</think>{{"name": "A"}}')
    inside = compile_demand(Demand(PERSON, TOOLS, syntax=HERMES, reasoning=INSIDE)).grammar
    assert accepts(inside, f'{thought}</think>{{"name": "A"}}') and accepts(inside, f"{thought}</think>\n{now}")
    assert not accepts(inside, '{"name": "A"}') and not accepts(inside, f"{thought}</think>{wrong}")
    free = compile_demand(Demand(tools=TOOLS, syntax=HERMES, reasoning=THINK)).grammar
    for text in (
        "Hi",
        f"<think>{thought}</think>\nHi {now}",
        f"Hi {now}",
        f"<think>{thought}</think>{now}<think>so</think>{now}",
    ):
        assert accepts(free, text), text
    for text in (f"<think>{thought}</think>{wrong}", f"Hi{wrong}", f"{now}<think>{wrong}</think>"):
        assert not accepts(free, text), text
    begun = compile_demand(Demand(tools=TOOLS, syntax=HERMES, reasoning=INSIDE)).grammar
    assert accepts(begun, f"{thought}</think>Hi {now}") and not accepts(begun, f"{thought}</think>{wrong}")
    marks = Marks(SYSTEM, TOKENIZER.token_text(3), begins_inside=False)
    special = {marks.begin: 4, marks.end: 3}
    for demand in (Demand(PERSON, TOOLS, syntax=HERMES), Demand(tools=TOOLS, syntax=HERMES)):
        grammar = compile_demand(demand._replace(reasoning=marks, special=special)).grammar
        assert accepts(grammar, f"{marks.begin}{thought}{marks.end}{now}") and not accepts(
            grammar, f"{marks.begin}x{marks.end}{wrong}"
        )


@pytest.mark.parametrize("family", [name for name in SYNTAXES if name != "harmony"])
@pytest.mark.parametrize("marks", [None, INSIDE, THINK, "special"], ids=["no reasoning", "inside", "optional", "special"])
def test_the_parser_reads_what_a_grammar_lets_the_model_write(family: str, marks: Any, seed: int) -> None:
    """Calls and formats after random reasoning, and calls in random text."""
    syntax, special = SYNTAXES[family], {}
    if marks == "special":
        marks = Marks(SYSTEM, TOKENIZER.token_text(3), begins_inside=False)
        special = {marks.begin: 4, marks.end: 3}
    reasoning = ReasoningSyntax(marks.begin, marks.end) if marks else None
    now = written(syntax, "now", "{}")
    thought = f"So {now}" if marks else ""
    begin = f"{marks.begin * (not marks.begins_inside)}{thought}{marks.end}\n" if marks else ""
    demand = Demand(tools=TOOLS, syntax=syntax, reasoning=marks, special=special)
    weather = '{"city": "Ulm"}'
    asked = [
        (demand._replace(calls="must"), ""),
        (demand._replace(constraint=PERSON), "{"),
        (demand._replace(constraint=PERSON), now),
    ]
    both = f"{now} {written(syntax, 'weather', weather)}".replace("] [", ", " if family == "pythonic" else "] [")
    asked.append((demand, f"{'Hi ' * bool(syntax.trigger)}{both}"))
    for one, start in asked:
        ends = one.constraint is None and one.calls == "may"  # free text, which is given, because it ends only by chance
        text = write(compile_demand(one).grammar, begin=begin + start, until=start[-2:] * (ends or start == now))
        schemas = {tool.name: tool.schema for tool in TOOLS}
        tools = Tools(syntax, frozenset(schemas), forced=one.calls == "must", schemas=schemas)
        parser, parts = AnswerParser(reasoning, bool(marks and marks.begins_inside), tools, frozenset(special)), PartList()
        for part in parser.push(text, final=True):
            parts.add(part)
        found = parts.joined()
        assert "".join(part.text for part in found if isinstance(part, Reasoning)) == thought, text
        calls = [part.name for part in found if isinstance(part, Call)]
        arguments = [json.loads(part.text) for part in found if isinstance(part, Arguments)]
        for name, given in zip(calls, arguments, strict=True):
            schema = next(tool.schema for tool in TOOLS if tool.name == name)
            jsonschema.validate(given, {**schema, "additionalProperties": False})
        content = "".join(part.text for part in found if isinstance(part, Text))
        assert parser.complete == bool(calls)
        if ends:
            assert calls == ["now", "weather"] and content.strip() == "Hi" * bool(syntax.trigger), text
        elif start == "{" and not calls:
            jsonschema.validate(json.loads(content), PERSON.value)
        else:
            assert len(calls) == 1 and not content, text


def rich_schema(rng: random.Random) -> dict[str, Any]:
    """Of all types; some properties may be left out."""
    names = {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    place = {"type": "object", "properties": {"lat": digit, "names": names}, "required": ["lat"], "additionalProperties": False}
    properties = {
        "city": {"type": "string", "minLength": 1, "maxLength": 4},
        "unit": {"enum": ["C", "7", 7, None, True]},
        "maybe": {"anyOf": [digit, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/Hour"}, "minItems": 1, "maxItems": 3},
        "ratio": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        "place": place,
    }
    listed = dict(rng.sample(list(properties.items()), rng.randint(2, len(properties))))
    required = [name for name in listed if rng.random() < 0.5]
    return {
        "type": "object",
        "properties": listed,
        "required": required,
        "$defs": {"Hour": digit},
        "additionalProperties": False,
    }


NO_JSON = [name for name, syntax in SYNTAXES.items() if syntax.arguments]


def arguments_of(text: str, syntax: CallSyntax, schema: dict[str, Any]) -> Any:
    """The arguments of a text that is one call of the tool `f`."""
    parser, parts = AnswerParser(None, False, Tools(syntax, frozenset("f"), schemas={"f": schema}), frozenset()), PartList()
    for part in parser.push(text, final=True):
        parts.add(part)
    [call, arguments] = parts.joined()
    assert isinstance(call, Call) and isinstance(arguments, Arguments) and parser.complete, text
    return json.loads(arguments.text)


@pytest.mark.parametrize("family", NO_JSON)
def test_arguments_that_are_no_json_fit_their_schema(family: str, seed: int) -> None:
    """What is not reported is enforced, of simple schemas all."""
    syntax, rng, checker = SYNTAXES[family], random.Random(seed), jsonschema.FormatChecker()
    for i in range(12):
        simple = i < 3
        listed = {
            "properties": {name: random_schema(rng, 2) for name in "ab"},
            "$defs": {one: random_leaf(rng) for one in "pq"},
        }
        schema = rich_schema(rng) if simple else {"type": "object", **listed, "required": ["a"]}
        try:
            compiled = compile_demand(Demand(tools=[CallableTool(0, "f", schema, simple)], calls="must", syntax=syntax))
        except SchemaError:
            assert not simple
            continue
        assert not (simple and compiled.not_enforced)
        if compiled.not_enforced:
            continue
        text = ""
        with contextlib.nullcontext() if simple else contextlib.suppress(AssertionError):  # text without bounds may be too long
            text = write(compiled.grammar, limit=4000 if simple else 300)
        if text:
            given = arguments_of(text, syntax, schema)
            errors = [*jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(given)]
            assert not errors, (schema, given)


@pytest.mark.parametrize("family", NO_JSON)
@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"enum": [1, None, "\x7f"], "type": ["null", "string"]}, None),
        ({"enum": [1, None], "allOf": [{"type": "null"}]}, None),
        ({"const": {"b": 1}, "properties": {"b": {"type": "integer"}}}, None),
        ({"type": "integer", "anyOf": [{"maximum": 3, "minimum": 2}, {"type": "integer", "minimum": 9, "maximum": 9}]}, None),
        ({"type": "integer", "anyOf": [{"type": ["integer", "null"], "maximum": 3}]}, "type"),
        ({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]}, "oneOf"),
        ({"properties": {"b": False}, "type": "object"}, None),
        ({"$ref": "#/properties/b", "const": 1}, "const"),
        ({"type": "integer", "anyOf": [{"$ref": "#/properties/b", "maximum": 1}]}, "anyOf/0/maximum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_all_of_a_value_is_enforced_or_named(family: str, schema: dict[str, Any], left_out: str | None) -> None:
    syntax = SYNTAXES[family]
    whole = {"properties": {"a": schema, "b": {"type": "integer"}}, "required": ["a"]}
    tool = CallableTool(0, "f", whole, left_out is None)
    found = compile_demand(Demand(tools=[tool], calls="must", syntax=syntax))
    assert found.not_enforced == ((f"{tool.path}#/properties/a/{left_out}",) if left_out else ())
    if left_out:
        with pytest.raises(SchemaError):
            compile_demand(Demand(tools=[tool._replace(strict=True)], calls="must", syntax=syntax))
    else:
        jsonschema.validate(arguments_of(write(found.grammar), syntax, whole), whole)


ENDS = ["</parameter>", "a</arg_value>b", "</tool_call>", '<|"|>', "'\"", "a\nb\n", " ", "5", "true", "None", "", ")", "é,=>"]
CONSTANTS = [*ENDS, [ENDS[0], ENDS[1]], {'a "b"': [None, True, 1.5, {"<|": '"x"'}]}, {ENDS[3]: 1}, {}, [[]], 7, False, None]


@pytest.mark.parametrize(("place", "family"), list(enumerate(NO_JSON)))
def test_no_value_or_name_ends_a_call_early(place: int, family: str, in_turn: Callable[..., list[Any]]) -> None:
    """It is written so that the parser reads it back, or refused."""
    refused, syntax = list[Any](), SYNTAXES[family]
    listed = [{name: {"const": 1}} for name in ENDS]
    values = ("5", "true", "None", "", ENDS[0], ENDS[1])
    mixed = [*({"a": {"enum": [value, 8]}} for value in values), {"a": {"enum": [ENDS[:2], "x"]}}]
    asked = [*({"a": {"enum": [value]}} for value in CONSTANTS), *mixed, *listed]
    for one in in_turn((asked[::2], asked[1::2]), place):
        schema = {"type": "object", "properties": one, "required": [*one]}
        tool = CallableTool(0, "f", schema, True)
        try:
            text = write(compile_demand(Demand(tools=[tool], calls="must", syntax=syntax)).grammar)
        except SchemaError as e:
            if "cannot be written" not in str(e) or e.tool != 0:
                raise
            free = compile_demand(Demand(tools=[tool._replace(strict=False)], syntax=syntax))
            assert free.not_enforced == (tool.path,)
            refused.append(one)
            continue
        jsonschema.validate(arguments_of(text, syntax, schema), {**schema, "additionalProperties": False})
    assert (family == "gemma4" or refused) and len(refused) < len(CONSTANTS) / 2, refused  # that family writes most of them


@pytest.mark.parametrize("family", NO_JSON)
def test_many_constants_are_one_item_of_the_parser(family: str) -> None:
    values = [f"{i} {''.join(random.choices(string.ascii_letters, k=10))}" for i in range(3000)]
    schema = {"properties": {"a": {"type": "string", "enum": values}}, "required": ["a"]}
    found = compile_demand(Demand(tools=[CallableTool(0, "f", schema, True)], calls="must", syntax=SYNTAXES[family])).grammar
    assert arguments_of(write(found), SYNTAXES[family], schema)["a"] in values


@pytest.mark.parametrize("family", NO_JSON)
def test_a_listed_name_comes_once(family: str) -> None:
    """Where other names are allowed, too, whose values fit another schema."""
    syntax, inner = SYNTAXES[family], {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    given = {"a": 1, "bb": "x"}
    for schema in (inner, {"properties": {"o": {"type": "object", **inner}}}):
        found = compile_demand(Demand(tools=[CallableTool(0, "f", schema, True)], calls="must", syntax=syntax)).grammar
        if schema is not inner and family == "gemma4":
            names = ("bb", '<|"|>bb<|"|>')
            texts = [f'<|tool_call>call:f{{o:{{a:1,{name}:<|"|>x<|"|>}}}}<tool_call|>' for name in names]
        else:
            texts = [written(syntax, "f", json.dumps(given if schema is inner else {"o": given}))]
        for text in texts:
            assert accepts(found, text) and not accepts(found, text.replace("bb", "a")), text


@pytest.mark.parametrize("family", NO_JSON)
def test_a_required_name_that_is_not_listed_has_the_schema_of_such_names(family: str) -> None:
    syntax, schema = SYNTAXES[family], {"properties": {"a": {}}, "required": ["z"], "additionalProperties": {"type": "integer"}}
    found = compile_demand(Demand(tools=[CallableTool(0, "f", schema, True)], calls="must", syntax=syntax))
    for value, fits in ((5, True), ("x", False)):
        assert accepts(found.grammar, written(syntax, "f", json.dumps({"z": value}))) == fits


@pytest.mark.parametrize(
    ("family", "end"), [("qwen3_coder", "</parameter>"), ("seed_oss", "</parameter>"), ("glm45", "</arg_value>")]
)
def test_a_text_in_tags_has_no_closing_tag(family: str, end: str) -> None:
    for bounds in ({}, {"minLength": 20, "maxLength": 60}):
        schema = {"properties": {"a": {"type": "string", **bounds}}, "required": ["a"]}
        found = compile_demand(
            Demand(tools=[CallableTool(0, "f", schema, True)], calls="must", syntax=SYNTAXES[family])
        ).grammar
        call = next(one for one in tagged("f", {"a": "x" * 20}) if accepts(found, one))
        assert not accepts(found, call.replace("xx", f"x{end}x", 1))


@pytest.mark.parametrize("family", NO_JSON)
def test_what_stands_beside_a_reference_to_all_arguments_is_named(family: str) -> None:
    schema = {"$ref": "#/$defs/x", "required": ["a"], "$defs": {"x": {"properties": {"a": {"type": "integer"}}}}}
    found = compile_demand(Demand(tools=[CallableTool(0, "f", schema, False)], calls="must", syntax=SYNTAXES[family]))
    assert found.not_enforced == ("tools.0.function.parameters#/required",)


@pytest.mark.parametrize("reference", ["#one", "#/$defs/a%20b", "#/$defs/list/anyOf/1", "http://x/y#one"])
def test_a_reference_of_any_form_is_followed_in_calls_that_are_no_json(reference: str) -> None:
    number = {"type": "integer", "$anchor": "one"}
    schema = {
        "$id": "http://x/y",
        "properties": {"a": {"$ref": reference}},
        "required": ["a"],
        "$defs": {"a b": number, "list": {"anyOf": [{"type": "string"}, number]}},
    }
    if "one" in reference:
        del schema["$defs"]["list"]  # type: ignore[attr-defined]
    tool = CallableTool(0, "f", schema, True)
    found = compile_demand(Demand(tools=[tool], calls="must", syntax=SYNTAXES["qwen3_coder"]))
    assert not found.not_enforced
    assert any(accepts(found.grammar, one) for one in tagged("f", {"a": 5}))
    assert not any(accepts(found.grammar, one) for one in tagged("f", {"a": "hello"}))
    assert types_of(schema, "a") == {"integer"}


def test_what_only_json_could_enforce_is_named_or_refused() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^[0-9]+$"}, "b": {"type": "string", "maxLength": 2}}}
    tool = CallableTool(3, "f", schema, False)
    found = compile_demand(Demand(tools=[tool], calls="must", syntax=SYNTAXES["qwen3_coder"]))
    assert found.not_enforced == ("tools.3.function.parameters#/properties/a/pattern",)
    call = tagged("f", {"a": "x", "b": "ab"})[0]
    assert accepts(found.grammar, call) and not accepts(found.grammar, call.replace("ab", "abc"))
    with pytest.raises(SchemaError, match="in the form in which this model writes calls") as caught:
        compile_demand(Demand(tools=[tool._replace(strict=True)], calls="must", syntax=SYNTAXES["qwen3_coder"]))
    assert caught.value.tool == 3
    python = compile_demand(Demand(tools=[tool._replace(strict=True)], calls="must", syntax=SYNTAXES["pythonic"]))
    assert accepts(python.grammar, '[f(a="12")]') and not accepts(python.grammar, '[f(a="x")]')


def test_arguments_are_an_object_whatever_the_schema_says() -> None:
    x = {"properties": {"x": {"type": "integer"}}}
    for schema in (x, {**x, "type": ["null", "object"]}, {"$ref": "#/$defs/X", "$defs": {"X": x}}, {"anyOf": [x, x]}):
        for syntax, begin, end in ((JSON, "", ""), (HERMES, "<tool_call>\n", "\n</tool_call>")):
            must = compile_demand(Demand(tools=[CallableTool(0, "f", schema, True)], calls="must", syntax=syntax)).grammar
            for arguments in ('{"x": 1}', "{}", "5", "null", "[]"):
                text = f'{begin}{{"name": "f", "arguments": {arguments}}}{end}'
                assert accepts(must, text) == arguments.startswith("{"), (schema, text)
    with pytest.raises(SchemaError, match="not object"):
        compile_demand(Demand(tools=[CallableTool(0, "f", {"type": "array", "items": {}}, False)], calls="must"))


def test_a_tool_that_need_not_be_called_may_have_a_wrong_schema() -> None:
    wrong = CallableTool(3, "wrong", {"type": "object", "properties": {"x": {"type": "nope"}}}, False)
    found = compile_demand(Demand(tools=[*TOOLS, wrong], syntax=HERMES))
    assert found.not_enforced == ("tools.3.function.parameters",)
    assert accepts(found.grammar, '<tool_call>\n{"name": "wrong", "arguments": {"x": [1]}}\n</tool_call>')
    for demand in (
        Demand(tools=[wrong._replace(strict=True)], syntax=HERMES),
        Demand(tools=[wrong], calls="must", syntax=HERMES),
    ):
        with pytest.raises(SchemaError) as caught:
            compile_demand(demand)
        assert caught.value.tool == 3


def test_structural_tags(site: Site) -> None:
    structures = [{"begin": f"<f={name}>", "schema": {"enum": [name]}, "end": "</f>"} for name in ("a", "b")]
    tags = {"structures": structures, "triggers": ["<f="]}
    for asked in (
        {"response_format": {"type": "structural_tag", **tags}},
        {"structured_outputs": {"structural_tag": tags}},
        {"structured_outputs": {"structural_tag": json.dumps(tags)}},
    ):
        grammar = grammar_of(site, **asked)
        assert accepts(grammar, 'Hi <f=a>"a"</f> and <f=b>"b"</f>') and accepts(grammar, "Hi <f")
        assert not accepts(grammar, '<f=a>"b"</f>') and not accepts(grammar, "<f=c>")
    # a special token that the grammar names by its id
    begin = {"begin": f"{SYSTEM}f=", "schema": {"enum": ["a"]}, "end": "</f>"}
    grammar = grammar_of(site, structured_outputs={"structural_tag": {"structures": [begin], "triggers": [SYSTEM]}})
    assert accepts(grammar, f'Hi {SYSTEM}f="a"</f>') and not accepts(grammar, f"Hi {SYSTEM}g")
    behind = {"structures": [{**begin, "begin": f"<{SYSTEM}"}], "triggers": [f"<{SYSTEM}"]}
    assert site.refused("/v1/completions", {"prompt": "x", "structured_outputs": {"structural_tag": behind}})
    tags["triggers"] = ["<g="]
    body = {"prompt": "x", "response_format": {"type": "structural_tag", **tags}}
    assert site.refused("/v1/completions", body)["param"] == "response_format"


# --- tool_choice -------------------------------------------------------------------------------------------------------------


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(site: Site) -> None:
    now: Any = {"type": "function", "function": {"name": "now"}}
    call = '{"name": "now", "arguments": {}}'
    site.chat(tools=[TOOL, now], max_tokens=1)
    prompt = site.last().prompt_ids
    site.engine.reply = lambda submit: TOKENIZER.encode(call, add_special_tokens=False)
    for mode in ("auto", "required"):
        for name in ("now", "weather"):
            answer = site.chat(tools=[TOOL, now], tool_choice=allowed_tools(mode, name))["choices"][0]
            assert site.last().prompt_ids == prompt, "the prompt has all tools"
            grammar = site.last().params.grammar or ""
            assert accepts(grammar, call) == (name == "now" or mode == "auto"), "without a tool of that name, it is text"
            assert not accepts(grammar, call.replace("now", name).replace("{}", '{"x": 1}'))
            if mode == "auto":
                assert bool(answer["message"].get("tool_calls")) == (name == "now")


def test_calls_in_free_text_are_constrained_by_a_late_grammar() -> None:
    strict: Any = {"type": "function", "function": {**TOOL["function"], "name": "exact", "strict": True}}
    asked: list[tuple[dict[str, Any], set[str] | None]] = [
        ({}, None),
        ({"tools": [TOOL]}, {"weather"}),
        ({"tools": [TOOL, strict]}, {"weather", "exact"}),
        ({"tools": [TOOL, strict], "tool_choice": "none"}, None),
        ({"tools": [TOOL, strict], "ignore_eos": True}, None),
        ({"tools": [TOOL, strict], "tool_choice": allowed_tools("auto", "weather")}, {"weather"}),
    ]
    for fields, names in asked:
        body = ChatBody.model_validate({**CHAT, **fields})
        demand = demand_of(body, HERMES, None)
        assert (demand and {tool.name for tool in demand.tools}) == names, fields
        assert demand is None or (demand.calls, demand.constraint) == ("may", None)
        assert demand_of(body, None, None) is None, "calls are text"
        params = make_params(body, TOKENIZER, VOCAB, [9], names and "start: X", [], [])[0]
        assert params.late_grammar == (names is not None)
        assert params.grammar_optional == (names == {"weather"} and "tool_choice" not in fields)
    forced = ChatBody.model_validate({**CHAT, "tools": [TOOL], "tool_choice": "required"})
    form = ChatBody.model_validate({**CHAT, "tools": [TOOL], "response_format": {"type": "json_object"}})
    assert not forced.is_mostly_free and not form.is_mostly_free


def optional_tools(count: int, properties: int) -> list[CallableTool]:
    listed = {f"key{i}": {"type": "string"} for i in range(properties)}
    return [CallableTool(i, f"tool{i}", {"type": "object", "properties": listed}, False) for i in range(count)]


@pytest.mark.parametrize(("properties", "first"), [(8, True), (9, False), (16, False)])
def test_many_optional_properties_come_behind_the_name(properties: int, first: bool) -> None:
    """At the beginning of arguments whose tool is not known, the library follows all of them."""
    grammar = compile_demand(Demand(tools=optional_tools(16, properties), syntax=HERMES)).grammar
    assert accepts(grammar, '<tool_call>{"name": "tool3", "arguments": {"key0": "x"}}</tool_call>')
    assert accepts(grammar, '<tool_call>{"arguments": {"key0": "x"}, "name": "tool3"}</tool_call>') == first


def test_a_grammar_that_ranks_cannot_compile_is_found_before() -> None:
    with pytest.raises(SchemaError) as e:
        compile_demand(Demand(tools=optional_tools(128, 120)))
    assert "backtrace" not in str(e.value)


def test_a_busy_worker_leaves_free_what_need_not_be_constrained(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = make_site(tool_parser="hermes")
    monkeypatch.setattr("server.calls.BRIEF_SECONDS", 0.2)
    named: Any = {"type": "function", "function": {**TOOL["function"], "name": f"new_{random.getrandbits(60):x}"}}
    strict: Any = {"type": "function", "function": {**named["function"], "strict": True}}
    workers, gate = site.server.service.workers, tmp_path / "gate"

    def run(*job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(workers.run(*job, slow=True), site.server._loop)

    run(time.sleep, 0).result(120)  # the worker starts
    wait_for(lambda: 1 in workers._idle)
    blocker = run(until_there, str(gate))
    wait_for(lambda: 1 not in workers._idle)
    site.chat(tools=[named], tool_choice="auto", max_tokens=1)
    assert not blocker.done() and site.last().params.grammar is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(site.chat, tools=[strict], tool_choice="auto", max_tokens=1)
        wait_for(lambda: workers._slow or waiting.done())
        gate.touch()
        waiting.result()
    assert blocker.done() and site.last().params.grammar, "it waits"


def test_concurrent_requests_with_an_equal_grammar_compile_it_once(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site, count = make_site(), 80
    workers, gate = site.server.service.workers, tmp_path / "gate"
    blocker = site.occupy_worker(gate)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": PERSON.value, "strict": True}}
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(site.chat, response_format=form, max_tokens=1) for _ in range(count)]
        try:
            wait_for(lambda: sum(len(job.callers) for job in workers._slow) == count or any(one.done() for one in answers))
            jobs = len(workers._slow)
        finally:
            gate.touch()
        for one in answers:
            one.result()
    blocker.result()
    assert jobs == 1 and all(submit.params.grammar for submit in site.engine.submits[-count:])


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_clock_decides_what_is_constrained_with_deterministic(
    deterministic: bool, make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that no worker takes in time, or that takes too long, is an error. A schema that cannot be enforced never is one."""
    site, run, found = make_site(tool_parser="hermes", deterministic=deterministic), Workers.run, list[Any]()
    raised = list[Exception]()

    async def fail(self: Workers, function: Any, *arguments: Any, wait_seconds: float | None = 0.0, **options: Any) -> Any:
        if function is not compile_demand:
            return await run(self, function, *arguments, **options)
        found.append(wait_seconds)
        raise raised[-1]

    monkeypatch.setattr(Workers, "run", fail)
    for error in (ApiError(503, "all are busy", None, "overloaded"), ApiError(400, "too long", None, "too_complex")):
        raised.append(error)
        if deterministic:
            found.append(site.refused("/v1/chat/completions", {**CHAT, "tools": [TOOL]}, error.status_code)["code"])
            assert found == [None, error.code]
        else:
            site.chat(tools=[TOOL], max_tokens=1)
            assert found == [BRIEF_SECONDS] and site.last().params.grammar is None
        found.clear()
    raised.append(SchemaError("it has no meaning"))
    site.chat(tools=[TOOL], max_tokens=1)
    assert found and site.last().params.grammar is None


def test_calls_are_not_constrained_by_a_guess(site: Site) -> None:
    """The template writes no calls, so how the model does is not known."""
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    for fields, constrained in (
        ({"tools": [TOOL]}, False),
        ({"tools": [strict]}, True),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
    ):
        site.chat(**fields, max_tokens=1)
        assert bool(site.last().params.grammar) == constrained, fields


def test_a_format_beside_tools(site: Site) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": PERSON.value, "strict": True}}
    for choice in ("auto", None, "none", "required"):
        site.chat(tools=[TOOL], tool_choice=choice, response_format=form, max_tokens=1)
        grammar = site.last().params.grammar or ""
        assert accepts(grammar, '{"name": "weather", "arguments": {"city": "Ulm"}}') == (choice != "none")
        assert accepts(grammar, '{"name": "A"}') == (choice != "required")
    wrong = {"name": "f", "parameters": {"type": "array", "uniqueItems": True}, "strict": True}
    body = {**CHAT, "tools": [TOOL, {"type": "function", "function": wrong}], "response_format": form}
    assert site.refused("/v1/chat/completions", body)["param"] == "tools.1.function.parameters"

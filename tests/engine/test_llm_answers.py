"""`LLM`: answers in a format, JSON schemas among them, and the calls of tools in them."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from engine import LLM, SamplingParams
from engine.calls.syntax import SYNTAXES
from engine.constrain import formats
from engine.text import special_ids
from engine.thinking import REASONING, ReasoningSyntax
from errors import UserError
from tests import MODELS
from tests.engine.test_engine import ALONE, config_of, random_model
from tests.support.server_thread import Site

TINY = MODELS / "tiny-hybrid"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 99}},
    "required": ["animal", "legs"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]
ASKED = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(TINY), world=ALONE)


def test_answers_have_the_format_that_is_asked_for(llm: LLM, seed: int) -> None:
    """Each of its own in one call, also in a chat; a schema as a dict and as text."""
    formats.format_grammar.cache_clear()
    words = [f"{random.randrange(10**6)} {sign}" for sign in '"\\aé']
    wanted = [
        SamplingParams(max_tokens=60, seed=seed, json_schema=random.choice([SCHEMA, json.dumps(SCHEMA)])),
        SamplingParams(max_tokens=60, seed=seed, regex="[a-f]{3}-[0-9]{2,4}"),
        SamplingParams(max_tokens=60, seed=seed, choice=words),
        SamplingParams(max_tokens=9, seed=seed),
    ]
    for answers in (llm.generate(["The fox"] * 4, wanted), llm.chat([ASKED] * 4, wanted)):
        data, matched, chosen, free = (one.text for one in answers)
        jsonschema.validate(json.loads(data), SCHEMA)
        assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", matched) and chosen in words
        assert not re.fullmatch("[a-f]{3}-.*", free) and free not in words
        assert {one.finish_reason for one in answers[:3]} == {"stop"}
    many = llm.generate(["One"] * 20, wanted[0])
    assert len({one.text for one in many}) > 1 and formats.format_grammar.cache_info().misses == 3
    for one in many:
        jsonschema.validate(json.loads(one.text), SCHEMA)


def test_python_and_http_give_the_same_grammar(tmp_path: Any, seed: int) -> None:
    site = Site(tmp_path).start()
    for python, http in (
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ):
        body = {"prompt": "One", "max_tokens": 4, "structured_outputs": http}
        assert site.http.post("/v1/completions", json=body).status_code == 200
        ((name, value),) = python.items()
        assert site.engine.submits[-1].params.grammar == formats.format_grammar(name, json.dumps(value))
    site.close()


def test_arguments_of_calls_fit_their_schemas(llm: LLM, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """By the server's grammar, also behind reasoning; not where the answer has a format or does not end."""
    given, asked = dict[str, Any](tools=TOOLS, max_tokens=9, messages=ASKED), list[SamplingParams]()
    stream = llm.stream
    monkeypatch.setattr(llm, "stream", lambda ids, params, **more: asked.extend(params) or stream(ids, params, **more))
    base = llm.tokenizer.chat_templates["default"]
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    for marks in ("<tool_call>", "<tool_call> <think></think>", "[TOOL_CALLS]", "<tool_call> strict", ""):
        template, given["tools"] = base + f"{{# {marks} #}}", strict if "strict" in marks else TOOLS
        monkeypatch.setitem(llm.tokenizer.chat_templates, "default", template)
        (file := tmp_path / "template").write_text(template)
        site = Site(tmp_path, chat_template=str(file)).start()
        assert site.http.post("/v1/chat/completions", json=given).status_code == 200
        (http,) = site.engine.submits
        site.close()
        llm.chat([ASKED] * 2, SamplingParams(max_tokens=2), tools=given["tools"])
        names = ("grammar", "late_grammar", "grammar_optional", "kept_special")
        for one in asked[-2:]:
            assert [getattr(one, name) for name in names] == [getattr(http.params, name) for name in names]
        assert bool(http.params.grammar) == bool(marks)
    template = base + "{# <tool_call> #}"
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", template)
    for params in (
        SamplingParams(regex="a"),
        SamplingParams(grammar='start: "a"'),
        SamplingParams(ignore_eos=True, max_tokens=3),
    ):
        llm.chat(ASKED, params, tools=TOOLS)
        assert (asked[-1].grammar == params.grammar or params.regex) and not asked[-1].late_grammar
    monkeypatch.setitem(SYNTAXES, "hermes", replace(SYNTAXES["hermes"], trigger="<|system|>"))
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", template + "{# <tool_call> again #}")
    pet = {"type": "function", "function": {"name": "pet", "parameters": SCHEMA}}
    called = {llm.tokenizer.special_texts["<|system|>"]: 100.0}  # wherever the grammar allows it
    answers = llm.chat([ASKED] * 8, SamplingParams(max_tokens=300, seed=seed, logit_bias=called), tools=[pet])
    calls = [call for answer in answers for call in answer.message.get("tool_calls", [])[:-1]]  # the last call may be cut
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_odd_schemas_of_tools(llm: LLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seed: int) -> None:
    """They are refused if they are strict; else a line says what is free."""
    template = llm.tokenizer.chat_templates["default"] + f"{{# <tool_call> {random.random()} #}}"
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", template)
    odd, short = {"properties": {"a": {"type": "string"}}, "not": {}}, SamplingParams(max_tokens=2)
    free, strict = ([{"function": {"name": "x", "parameters": odd, "strict": strict}}] for strict in (False, True))
    capfd.readouterr()
    llm.chat([ASKED] * 3, short, tools=free)
    assert capfd.readouterr().err == "not enforced of tools: tools.0.function.parameters#/not\n"
    with pytest.raises(UserError, match=r"^tools have a schema that cannot be enforced: "):
        llm.chat(ASKED, short, tools=strict)


def test_what_is_not_enforced_is_said_once(llm: LLM, capfd: pytest.CaptureFixture[str], seed: int) -> None:
    odd = {**SCHEMA, "title": f"{random.random()}", "not": {"required": ["tail"]}}
    capfd.readouterr()
    llm.generate(["a", "b"], SamplingParams(json_schema=odd, max_tokens=2))
    assert capfd.readouterr().err == "not enforced of a json_schema: #/not\n"


def test_formats_that_are_refused(llm: LLM) -> None:
    for given, words in (
        ({"json_schema": "{"}, "^json_schema cannot be enforced: it is not valid JSON$"),
        ({"json_schema": "3"}, "^json_schema cannot be enforced: it is not an object$"),
        ({"json_schema": {"type": "cat"}}, "^json_schema cannot be enforced: "),
        ({"regex": "("}, "^regex cannot be enforced: "),
        ({"regex": "((a{1000}){1000}){1000}"}, "^regex cannot be enforced: "),
        ({"choice": ["\ud800"]}, "^choice cannot be enforced: "),
    ):
        with pytest.raises(UserError, match=words):
            llm.generate("One", SamplingParams(**given))  # type: ignore[arg-type]
    for given, words in (
        ({"json_schema": [1]}, "^json_schema must be "),
        ({"regex": 3}, "^regex must be "),
        ({"choice": "abc"}, "^choice must be "),
        ({"choice": []}, "^choice must be texts"),
        ({"choice": ["a", ""]}, "^choice must be texts"),
        ({"choice": ["a", 1]}, "^choice must be texts"),
        ({"choice": ["a"], "regex": "a"}, "exclude each other"),
        ({"json_schema": SCHEMA, "grammar": "start: /a/"}, "exclude each other"),
    ):
        with pytest.raises(UserError, match=words):
            SamplingParams(**given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="this model has no tokenizer, so it cannot follow a grammar"):
        LLM(random_model(config_of("standard")), world=ALONE).generate([[1]], SamplingParams(regex="a"))


@pytest.mark.long
def test_calls_are_read_from_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With reasoning before them, also such that the prompt begins; text that is no call; and an answer that is cut off."""
    assert llm.tokenizer is not None
    city = "".join(random.choices('aä"\\{}<', k=6))
    arguments = json.dumps({"city": city}, ensure_ascii=random.random() < 0.5)
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    written = [call, f"Let me see.\n{call}\n{call}", f"<think>{call}</think>Sunny.", "Sunny.", call]
    marks = "{# <tool_call> <think></think> #}"
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", llm.tokenizer.chat_templates["default"] + marks)
    params = [SamplingParams(max_tokens=200, choice=[text]) for text in written]
    params[4] = params[4].changed(max_tokens=20)
    answers = llm.chat([ASKED] * 5, params, tools=TOOLS)
    first, two, thought, plain = (one.message or {} for one in answers[:4])
    assert [one.text for one in answers[:4]] == written[:4] and answers[4].finish_reason == "length"
    assert [one.finish_reason for one in answers[:4]] == ["tool_calls", "tool_calls", "stop", "stop"]
    (one,) = first["tool_calls"]
    assert first["content"] is None and "reasoning_content" not in first and re.fullmatch("call_[0-9a-f]{24}", one["id"])
    assert one["function"]["name"] == "weather" and json.loads(one["function"]["arguments"]) == {"city": city}
    assert two["content"] == "Let me see." and len({each["id"] for each in (one, *two["tool_calls"])}) == 3
    assert (thought["content"], thought["reasoning_content"]) == ("Sunny.", call) and "tool_calls" not in thought
    assert plain == {"role": "assistant", "content": "Sunny.", "refusal": None}
    long = SamplingParams(max_tokens=250, choice=[f"{call}\n{'y' * 3000}"])
    (ended,) = llm.chat(ASKED, long, tools=TOOLS)
    assert ended.finish_reason == "length" and ended.message is not None and ended.message["tool_calls"]
    (whole,) = llm.chat(ASKED, SamplingParams(max_tokens=200, choice=[call]))
    assert (whole.text, whole.message, whole.finish_reason) == (call, None, "stop")  # without tools
    result = {"role": "tool", "tool_call_id": one["id"], "content": "Rain"}
    (last,) = llm.chat([*ASKED, first, result], SamplingParams(max_tokens=200, choice=["It rains."]), tools=TOOLS)
    assert last.message is not None and last.message["content"] == "It rains."
    assert "weather" in llm.tokenizer.decode(last.prompt_ids, False).partition("How is")[2]  # the call is in the prompt
    begun = llm.tokenizer.chat_templates["default"].replace(
        "'<|assistant|>' -}}{%- endif", "'<|assistant|><think>' -}}{%- endif"
    )
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", begun)
    (inside,) = llm.chat(ASKED, SamplingParams(max_tokens=200, choice=[f"{call}</think>{call}"]), tools=TOOLS)
    assert inside.message is not None and inside.message["reasoning_content"] == call and inside.message["tool_calls"]


def test_marks_that_are_special_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no text, but are seen."""
    assert llm.tokenizer is not None
    marks = {"trigger": "<|system|>", "end": "<|user|>"}
    monkeypatch.setitem(SYNTAXES, "hermes", replace(SYNTAXES["hermes"], **marks))
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", llm.tokenizer.chat_templates["default"] + "{# <tool_call> #}")
    special_ids.cache_clear()
    ids = [llm.tokenizer.special_texts[text] for text in marks.values()]
    text = '"\\n{\\"name\\": \\"weather\\", \\"arguments\\": {}}\\n"'
    grammar = f'start: "Yes" <[{ids[1]}]> <[{ids[0]}]> {text} <[{ids[1]}]>'
    (answer,) = llm.chat(ASKED, SamplingParams(max_tokens=99, grammar=grammar), tools=TOOLS)
    assert answer.message is not None and answer.message["content"] == "Yes"
    assert [one["function"] for one in answer.message["tool_calls"]] == [{"name": "weather", "arguments": "{}"}]
    special_ids.cache_clear()


def test_marks_of_reasoning_that_are_special_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setitem(REASONING, "think", ReasoningSyntax("<|system|>", "<|user|>"))
    grammar = SamplingParams(max_tokens=99, grammar='start: <[4]> "hm" <[2]> "Yes"')
    (answer,) = llm.chat(ASKED, grammar, tools=TOOLS)
    assert answer.message is not None and answer.message["reasoning_content"] == "hm" and answer.message["content"] == "Yes"


def test_tools_that_are_refused(llm: LLM) -> None:
    for tools in ([{"name": "weather"}], ["weather"], [{"function": {}}], 3):
        with pytest.raises(UserError, match=r"^tools are dicts with type and function"):
            llm.chat(ASKED, tools=tools)  # type: ignore[arg-type]
    for message in ({"role": "user", "content": None}, {"role": "user"}, "Hello"):
        with pytest.raises(UserError, match=r"^a message is a dict"):
            llm.chat([message], tools=TOOLS)  # type: ignore[list-item]

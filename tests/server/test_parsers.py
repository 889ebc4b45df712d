"""Reasoning and tool calls in answers, as families of models write them."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engine.protocol import ThinkingBudget
from engine.thinking import REASONING
from server import call_syntax, replies
from server.answer_parser import AnswerParser, Tools
from server.call_syntax import SYNTAXES, syntax_of
from server.incremental import Reader
from server.parts import Arguments, Call, Part, PartList, Reasoning, Text
from tests.support.constrained import accepts
from tests.support.server_thread import CHAT, EOS, TOKENIZER, TOOL, Site

NAMES = frozenset(["weather", "now", "add"])
ULM = '{"city": "Ulm"}'
NESTED = '{"x": [1, {"y": "}] \\" </tool_call> é\\\\"}], "z": {}}'

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
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ULM}}}]', [("weather", ULM)]),
    ("mistral", "[TOOL_CALLS]nothing[ARGS]{}", ["nothing{}"]),
    ("mistral", "A [link](x), [TOOL] and [", None),
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
    hidden = [] if name == "hermes" else list(syntax.markers)  # as in these families' vocabularies
    hidden += ["[THINK]", "[/THINK]"] if reasoning == "mistral" else []
    made = Tools(syntax, NAMES, **tools)
    return AnswerParser(REASONING[reasoning] if reasoning else None, inside, made, frozenset(hidden))


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


@pytest.mark.parametrize("name", REASONING)
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
        # A space between two parts, so that their ends together are no marker.
        answer = " ".join(part.name if isinstance(part, Call) else part.text for part in results[0])
        read, whole = syntax.sub("", answer), syntax.sub("", text)
        if re.search(further, text) and any(isinstance(one, Arguments) for one in results[0][-1:]):
            whole = whole[: len(read)]  # a further call that is cut off is no text
        assert read == whole, (text, results[0])


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
    starts = [
        "",
        "<tool_call>",
        "[TOOL_CALLS]",
        '{"name": "weather", "arguments": {',
        '{"type": "',
        '{"arguments": {"',
        "```",
        "[",
    ]
    for start in starts:
        for repeated in (
            " ",
            "\n",
            "<",
            "a",
            '"',
            "\\",
            "[",
            "{",
            "{}",
            "```",
            "<tool_call>",
            "[TOOL_CALLS]",
            "</think",
            "<tool_cal",
        ):
            text = start + repeated * (200 // len(repeated))
            work = 0
            joined(AnswerParser(REASONING["think"], False, Tools(SYNTAXES[name], NAMES), frozenset()), [*text, ""])
            assert work < 16 * len(text), (start, repeated)


def test_the_template_tells_how_calls_are_written() -> None:
    templates = {
        "hermes": '{{- "<tool_call>\\n{\\"name\\": \\"" }}{{- "</tool_call>" }}',
        "llama3_json": """{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}""",
        "mistral": '{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
        "mistral_list": '{{- "[TOOL_CALLS] [" }}',
        "json": "{{ messages[0].content }}",
    }
    assert {name: syntax_of(template) for name, template in templates.items()} == {name: name for name in templates}


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
    monkeypatch.setitem(call_syntax.SYNTAXES, "llama3_json", replace(call_syntax.LLAMA, markers=(special,)))
    site = make_site(tool_parser="llama3_json")
    call = f'{{"name": "weather", "parameters": {ULM}}}'
    for text, content, calls in ((call, None, [{"name": "weather", "arguments": ULM}]), ("print()", "print()", [])):
        whole, events = answers(site, special + text + other, tools=[TOOL])
        message = whole["choices"][0]["message"]
        assert message["content"] == merged(events)["content"] == content
        assert [one["function"] for one in message.get("tool_calls", [])] == merged(events)["tool_calls"] == calls

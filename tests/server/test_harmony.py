"""A model that answers in gpt-oss's format: its grammars, and a server of a tiny one."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from engine.calls.syntax import HARMONY, Marks
from engine.constrain.demand import Constraint, Demand, compile_demand
from engine.constrain.json_schema import CallableTool
from engine.grammars import Grammars
from engine.text import special_ids
from engine.thinking import REASONING
from tests.support.harmony import save_tiny, save_tokenizer
from tests.support.server_process import ServerProcess
from text.tokenizer_files import load_tokenizer

CHANNEL, MESSAGE, NEXT = "<|channel|>", "<|message|>", "<|end|><|start|>assistant"
DIGIT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS = [CallableTool(i, name, DIGIT, True) for i, name in enumerate(("now", "later"))]
PERSON = Constraint("json", {"type": "object", "properties": {"name": {"enum": ["A", "B"]}}, "required": ["name"]}, "x")
TAGS = {"structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}], "triggers": ["<f"]}


def test_each_message_is_constrained(tmp_path: Path, seed: int) -> None:
    """Those before the last are free, whose end is one special token. Calls may be written in two ways."""
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    assert special_ids(tokenizer, REASONING["harmony"].markers).keys() == {CHANNEL, MESSAGE, "<|end|>", "<|start|>"}
    names = random.choices(["analysis", "commentary"], k=3)
    before = "".join(f"{CHANNEL}{name}{MESSAGE}Hm, <b> {{so}} to=functions.now.{NEXT}" for name in names)
    calls = [
        f'{CHANNEL}commentary to=functions.now <|constrain|>json{MESSAGE}{{"n": 3}}<|call|>',
        f' to=functions.later{CHANNEL}commentary json{MESSAGE}{{"n": 3}}',
    ]
    other, wrong = (calls[0].replace(*change) for change in ((".now", ".nothing"), ("3", '"3"')))
    text, person, nobody = (f"{CHANNEL}final{MESSAGE}{content}" for content in ("Hello", '{"name": "A"}', '{"name": "C"}'))
    tagged = [f"{CHANNEL}final{MESSAGE}Hi <f>{value}</f>" for value in (1, 2)]
    demand = Demand(
        tools=TOOLS,
        syntax=HARMONY,
        reasoning=Marks(REASONING["harmony"].start, "<|end|>", False),
        special=special_ids(tokenizer, HARMONY.markers),
    )
    marked = person.replace("final", "final <|constrain|>json")
    for one, right, refused in (
        (demand, [*calls, text, person], [other, wrong, "Hello", calls[0] + "x"]),
        (demand._replace(calls="must"), calls, [text, other, wrong]),
        (demand._replace(constraint=PERSON), [*calls, person, marked], [text, nobody, wrong]),
        (demand._replace(constraint=PERSON, tools=[]), [person], [*calls, text, nobody]),
        (demand._replace(constraint=Constraint("structural_tag", TAGS, "x"), tools=[]), [text, tagged[0]], [tagged[1], *calls]),
    ):
        matcher = grammars.compile(compile_demand(one).grammar)
        for answer in [*right, *refused]:
            for begin in ("", before):
                ids, copy = tokenizer.encode(begin + answer, add_special_tokens=False), matcher.deep_copy()
                accepted = copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()
                assert accepted == (answer in right), (one.calls, begin + answer)


# --- a server ------------------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "now", "parameters": DIGIT}}
ASK = {"role": "user", "content": "Hi <|end|> there"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("--model", str(save_tiny(tmp_path_factory.mktemp("tiny") / "gpt-oss")), ranks=2) as started:
        yield started.ready()


def chosen(server: ServerProcess, *words: str) -> dict[str, int]:
    """A bias that makes the random model write these tokens wherever a grammar lets it."""
    ids = server.http.post("/tokenize", json={"prompt": "".join(words), "add_special_tokens": False}).json()["tokens"]
    return {str(i): 100 for i in ids}


def test_calls_are_made_streamed_and_taken_back(server: ServerProcess) -> None:
    """A call that the request forces, whole and as a stream."""
    body = {"messages": [ASK], "tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
    body["logit_bias"] = chosen(server, "<|end|>", " c")
    reply = server.http.post("/v1/chat/completions", json=body).json()
    message = reply["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (reply["choices"][0]["finish_reason"], message["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "now"
    jsonschema.validate(json.loads(call["function"]["arguments"]), DIGIT)
    stream = list(server.client().chat.completions.create(**body, model="gpt-oss", stream=True))
    pieces = [one.function.arguments for chunk in stream for one in chunk.choices[0].delta.tool_calls or []]
    assert "".join(pieces) == call["function"]["arguments"]
    message |= {"content": "So:", "reasoning_content": "Hm"}  # as models often write it
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12"}
    for history in (
        [message],
        [message, result],
        [message | {"tool_calls": [call, call | {"id": "b"}]}, result, result | {"tool_call_id": "b"}],
    ):
        again = server.http.post("/v1/chat/completions", json={**body, "messages": [ASK, *history, ASK]})
        assert again.status_code == 200 and again.json()["choices"][0]["message"]["tool_calls"], again.text


def test_a_format_is_the_last_message_s(server: ServerProcess) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": DIGIT}}
    body = {"messages": [ASK], "response_format": schema, "max_tokens": 200, "temperature": 0}
    reply = server.http.post("/v1/chat/completions", json={**body, "logit_bias": chosen(server, "<|end|>", "f")}).json()
    jsonschema.validate(json.loads(reply["choices"][0]["message"]["content"]), DIGIT)

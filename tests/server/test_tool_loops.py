"""An agent's loop: an answer with calls, their results, and the prompt of the next turn, in each API and for chat templates that
take calls in different forms.

The templates are short, and behave as published ones of the families in what concerns calls.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import server_thread
from tests.support.server_thread import CHAT, EOS, TOKENIZER, TOOL, Site

ULM, BONN = '{"city": "Ulm"}', '{"city": "Bonn"}'
Calls = list[tuple[str, str]]  # ids and arguments

# Qwen2.5: no content where it is empty
QWEN25 = """{% for m in messages %}{% if m.role == "tool" %}<u><tool_response>{{ m.content }}</tool_response></u>
{% elif m.role == "assistant" %}<a>{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls %}{% set c = c.function %}
<tool_call>{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}</tool_call>{% endfor %}</a>
{% else %}<u>{{ m.content }}</u>{% endif %}{% endfor %}<a>"""
# Qwen3: searches the content, which must not be none, and takes arguments as text, too
QWEN3 = """{% for m in messages %}{% if m.role == "tool" %}<u><tool_response>{{ m.content }}</tool_response></u>
{% elif m.role == "assistant" %}<a>{% set content = m.content %}{% if "</think>" in m.content %}
{% set content = m.content.split("</think>")[-1] %}{% endif %}{{ content }}{% for c in m.tool_calls %}{% set c = c.function %}
<tool_call>{"name": "{{ c.name }}", "arguments": {% if c.arguments is string %}{{ c.arguments }}{% else %}
{{- c.arguments | tojson }}{% endif %}}</tool_call>{% endfor %}</a>
{% else %}<u>{{ m.content }}</u>{% endif %}{% endfor %}<a>"""
# Llama 3.1: one call in a message, whose text it drops
LLAMA = """{% for m in messages %}{% if "tool_calls" in m %}{% if m.tool_calls | length != 1 %}
{{ raise_exception("This model only supports single tool-calls at once!") }}{% endif %}{% set c = m.tool_calls[0].function %}
<a>{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}</a>{% elif m.role in ("tool", "ipython") %}
<r>{{ m.content | tojson }}</r>{% else %}<u>{{ m["content"] | trim }}</u>{% endif %}{% endfor %}
{% if false %}<|python_tag|>{% endif %}<a>"""
# Mistral: ids of 9 characters, and turns of alternating roles except for calls and results
CHECK = '{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}'
TURNS = """{% set ns = namespace(index=0) %}{% for m in messages %}
{% if not (m.role == "tool" or (m.tool_calls is defined and m.tool_calls is not none)) %}
{% if (m.role == "user") != (ns.index % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"""
MISTRAL_3 = f"""{TURNS}{{% for m in messages %}}{{% if m.role == "user" %}}[INST] {{{{ m.content }}}}[/INST]
{{%- elif m.tool_calls is defined and m.tool_calls is not none %}}[TOOL_CALLS] [{{% for c in m.tool_calls %}}
{{%- set out = c.function | tojson %}}{{{{ out[:-1] }}}}{{% if c.id is not defined or c.id | length != 9 %}}{CHECK}{{% endif %}}
{{{{- ', "id": "' + c.id + '"}}' }}}}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]{{{{ eos_token }}}}
{{%- elif m.role == "assistant" %}} {{{{ m.content | trim + eos_token }}}}
{{%- elif m.role == "tool" %}}[TOOL_RESULTS] {{"content": {{{{ m.content | string }}}}, "call_id": "
{{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}}{CHECK}{{% endif %}}{{{{ m.tool_call_id }}}}"}}[/TOOL_RESULTS]
{{%- endif %}}{{% endfor %}}"""
MISTRAL_11 = f"""{TURNS}{{% for m in messages %}}{{% if m.role == "user" %}}[INST]{{{{ m.content }}}}[/INST]
{{%- elif m.role == "assistant" %}}{{% if m.content is defined and m.content is not none %}}{{{{ m.content }}}}{{% endif %}}
{{%- for c in m.tool_calls or [] %}}{{% if c.id | length != 9 %}}{CHECK}{{% endif %}}
{{{{- "[TOOL_CALLS]" + c.function.name + "[CALL_ID]" + c.id + "[ARGS]" + c.function.arguments | tojson }}}}{{% endfor %}}</s>
{{%- elif m.role == "tool" %}}[TOOL_RESULTS]{{{{ m.tool_call_id }}}}[TOOL_CONTENT]{{{{ m.content }}}}[/TOOL_RESULTS]{{% endif %}}
{{%- endfor %}}"""
# DeepSeek-R1: calls only where the content is none, and arguments as text
R1 = """{% for m in messages %}{% if m.role == "user" %}<u>{{ m["content"] }}{% endif %}
{%- if m.role == "assistant" and m["content"] is none %}{% for c in m["tool_calls"] %}
{{- "<call>" + c["type"] + "<sep>" + c["function"]["name"] + "\\n```json\\n" + c["function"]["arguments"] + "\\n```</call>" }}
{%- endfor %}{% endif %}{% if m.role == "assistant" and m["content"] is not none %}{% set content = m["content"] %}
{%- if "</think>" in content %}{% set content = content.split("</think>")[-1] %}{% endif %}{{ "<a>" + content + "</a>" }}
{%- endif %}{% if m.role == "tool" %}{{ "<output>" + m["content"] + "</output>" }}{% endif %}{% endfor %}<a>"""


@dataclass
class Family:
    """`answer`: what the model writes, for arguments. `turn`: what the next prompt has of text, calls and results."""

    template: str
    answer: Callable[[list[str]], str]
    turn: Callable[[str, Calls], str]
    checks_ids: bool = False


def hermes(given: list[str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "weather", "arguments": {one}}}\n</tool_call>' for one in given)


def plain(given: list[str]) -> str:
    written = ", ".join(f'{{"name": "weather", "arguments": {one}}}' for one in given)
    return f"[{written}]"


def hermes_turn(text: str, calls: Calls) -> str:
    written = "".join(f'<tool_call>{{"name": "weather", "arguments": {given}}}</tool_call>' for _, given in calls)
    return f"<a>{text}{written}</a>" + "".join(f"<u><tool_response>dry {i}</tool_response></u>" for i in range(len(calls)))


def llama_turn(text: str, calls: Calls) -> str:
    return "".join(f'<a>{{"name": "weather", "parameters": {a}}}</a><r>"dry {i}"</r>' for i, (_, a) in enumerate(calls))


def mistral_3_turn(text: str, calls: Calls) -> str:
    written = ", ".join(f'{{"name": "weather", "arguments": {given}, "id": "{one}"}}' for one, given in calls)
    results = (f'[TOOL_RESULTS] {{"content": dry {i}, "call_id": "{one}"}}[/TOOL_RESULTS]' for i, (one, _) in enumerate(calls))
    return f"[TOOL_CALLS] [{written}]<eos>{''.join(results)}"


def mistral_11_turn(text: str, calls: Calls) -> str:
    written = "".join(f"[TOOL_CALLS]weather[CALL_ID]{one}[ARGS]{given}" for one, given in calls)
    results = (f"[TOOL_RESULTS]{one}[TOOL_CONTENT]dry {i}[/TOOL_RESULTS]" for i, (one, _) in enumerate(calls))
    return f"{text}{written}</s>{''.join(results)}"


def r1_turn(text: str, calls: Calls) -> str:
    written = "".join(f"<call>function<sep>weather\n```json\n{given}\n```</call>" for _, given in calls)
    return f"<a>{text}</a>" * bool(text) + written + "".join(f"<output>dry {i}</output>" for i in range(len(calls)))


FAMILIES = {
    "Qwen2.5": Family(QWEN25, hermes, hermes_turn),
    "Qwen3": Family(QWEN3, hermes, hermes_turn),
    "Llama 3.1": Family(
        LLAMA, lambda a: "<|python_tag|>" + "; ".join(f'{{"name": "weather", "parameters": {one}}}' for one in a), llama_turn
    ),
    "Mistral v3": Family(MISTRAL_3, lambda a: f"[TOOL_CALLS] {plain(a)}", mistral_3_turn, True),
    "Mistral v11": Family(MISTRAL_11, lambda a: "".join(f"[TOOL_CALLS]weather[ARGS]{one}" for one in a), mistral_11_turn, True),
    "R1": Family(R1, lambda a: f"```json\n{plain(a)}\n```", r1_turn),
}


@pytest.fixture(scope="module", params=FAMILIES)
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Family]]:
    folder = tmp_path_factory.mktemp("loop")
    family = FAMILIES[request.param]
    # line breaks are there for readers alone
    (folder / "template").write_text(family.template.replace("\n", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_thread, "CONTEXT", 1024)
        site = Site(folder, chat_template=str(folder / "template")).start()
        yield site, family
        site.close()


def chat(site: Site, foreign: Callable[[str], str]) -> tuple[str, Calls]:
    (choice,) = site.chat(tools=[TOOL])["choices"]
    message: Any = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    for call in message["tool_calls"]:
        call["id"] = foreign(call["id"])
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"dry {i}"} for i, call in enumerate(message["tool_calls"])
    ]
    if not message["content"]:  # clients send back none, an empty text, or nothing
        message = random.choice([message, {**message, "content": ""}, {k: v for k, v in message.items() if k != "content"}])
    site.chat(messages=[*CHAT["messages"], message, *results], tools=[TOOL], max_tokens=1)
    return message.get("content") or "", [(one["id"], one["function"]["arguments"]) for one in message["tool_calls"]]


def responses(site: Site, foreign: Callable[[str], str]) -> tuple[str, Calls]:
    tool = {"type": "function", **TOOL["function"]}
    first = site.post("/v1/responses", {"input": "Hi", "tools": [tool]})
    items = [one for one in first["output"] if one["type"] == "function_call"]
    for one in items:
        one["call_id"] = foreign(one["call_id"])
    results = [{"type": "function_call_output", "call_id": one["call_id"], "output": f"dry {i}"} for i, one in enumerate(items)]
    hi: Any = {"role": "user", "content": "Hi"}
    site.post("/v1/responses", {"input": [hi, *first["output"], *results], "tools": [tool], "max_output_tokens": 1})
    text = "".join(one["content"][0]["text"] for one in first["output"] if one["type"] == "message")
    return text, [(one["call_id"], one["arguments"]) for one in items]


def messages(site: Site, foreign: Callable[[str], str]) -> tuple[str, Calls]:
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    body: Any = {"model": "tiny-hybrid", "max_tokens": 100, "messages": CHAT["messages"], "tools": [tool]}
    first = site.post("/v1/messages", body)
    calls = [one for one in first["content"] if one["type"] == "tool_use"]
    for one in calls:
        one["id"] = foreign(one["id"])
    results = [{"type": "tool_result", "tool_use_id": one["id"], "content": f"dry {i}"} for i, one in enumerate(calls)]
    turns = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    site.post("/v1/messages", {**body, "messages": [*CHAT["messages"], *turns], "max_tokens": 1})
    text = "".join(one["text"] for one in first["content"] if one["type"] == "text")
    return text, [(one["id"].removeprefix("toolu_"), json.dumps(one["input"])) for one in calls]


@pytest.mark.parametrize("ask", [chat, responses, messages])
@pytest.mark.parametrize("count", [1, 2], ids=["one call", "two calls"])
@pytest.mark.parametrize("text", ["", "Look: "], ids=["", "behind text"])
def test_the_next_prompt_has_calls_and_results(loop: tuple[Site, Family], ask: Any, count: int, text: str) -> None:
    site, family = loop
    answer = text + family.answer([ULM, BONN][:count])
    site.says(answer)
    for foreign in (lambda one: one, lambda one: f"call_{random.getrandbits(96):024x}"):
        said, calls = ask(site, foreign)
        prompt = TOKENIZER.decode(site.last().prompt_ids, skip_special_tokens=False)
        prompt = prompt.replace(TOKENIZER.token_text(EOS), "<eos>")
        assert (said, [given for _, given in calls]) == (text.strip(), [ULM, BONN][:count])
        if family.checks_ids:
            found = list(dict.fromkeys(re.findall(r"(?:\"id\": \"|\[CALL_ID\])([A-Za-z0-9]{9})[\"\[]", prompt)))
            assert len(found) == count, prompt
            if foreign("x") == "x":
                assert found == [one for one, _ in calls]
            calls = [(one, given) for one, (_, given) in zip(found, calls, strict=True)]
        assert family.turn(said, calls) in prompt, prompt

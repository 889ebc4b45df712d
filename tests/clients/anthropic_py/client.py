from pathlib import Path

import anthropic
import httpx2
from features import ANSWER, HELLO, MODEL, SEEN, THINKING, THOUGHT, URL, WEATHER, feature, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
thinking = client.with_options(base_url=THINKING)
MESSAGES = [{"role": "user", "content": HELLO}]
STREAMS = sorted(Path(__file__).parents[2].glob("server/fixtures/messages/*.sse"))
REASONS = {"text": "end_turn", "thinking": "end_turn"}
CONTENTS = {
    "text": ["text"],
    "stop_sequence": ["text"],
    "max_tokens": ["text", "tool_use"],
    "tool_use": ["text", "tool_use", "tool_use"],
    "thinking": ["thinking", "text"],
}
TOOL = {"name": "weather", "description": "Weather of a city", "input_schema": WEATHER}


@feature("messages", "answer")
def _() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, messages=MESSAGES, system=system, max_tokens=100)
    assert answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.input_tokens


@feature("messages", "stream")
def _() -> None:
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=100) as stream:
        text = "".join(stream.text_stream)
    assert text and stream.get_final_message().usage.output_tokens
    for file in STREAMS:  # streams in the published order
        server = httpx2.MockTransport(lambda _, file=file: httpx2.Response(200, content=file.read_bytes()))
        recorded = client.with_options(http_client=httpx2.Client(transport=server))
        wrong = None
        try:
            with recorded.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=100) as stream:
                message = stream.get_final_message()
        except anthropic.APIStatusError as e:
            wrong = e
        assert ("overloaded" in str(wrong)) == (file.stem == "error"), wrong
        if wrong:
            continue
        assert message.stop_reason == REASONS.get(file.stem, file.stem) and message.usage.output_tokens > 1
        assert [block.type for block in message.content] == CONTENTS[file.stem]


@feature("messages", "tools")
def _() -> None:
    answer = client.messages.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=100)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    told = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, messages=told, tools=[TOOL], max_tokens=20).content


@feature("messages", "tools, streamed")
def _() -> None:
    named = {"type": "tool", "name": "weather"}
    with client.messages.stream(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=named, max_tokens=100) as stream:
        deltas = [event for event in stream if event.type == "input_json"]
    assert stream.get_final_message().content[-1].input["city"] in ("Paris", "Rome")
    assert len(deltas) > 1, "the input came in one delta"


@feature("messages", "reasoning")
def _() -> None:
    asked = {"model": MODEL, "max_tokens": 100, "thinking": {"type": "adaptive"}}
    answer = thinking.messages.create(messages=MESSAGES, **asked)
    assert (answer.content[0].thinking, answer.content[1].text) == (THOUGHT, ANSWER)
    with thinking.messages.stream(messages=MESSAGES, **asked) as stream:
        assert "".join(event.thinking for event in stream if event.type == "thinking") == THOUGHT
    told = [*MESSAGES, {"role": "assistant", "content": stream.get_final_message().content}, *MESSAGES]
    assert thinking.messages.create(messages=told, **asked).content[0].text == SEEN


@feature("messages", "tokens")
def _() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[TOOL], system="Be brief.").input_tokens
    answer = client.messages.create(model=MODEL, messages=MESSAGES, tools=[TOOL], system="Be brief.", max_tokens=1)
    used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted == used, f"counted {counted}, used {used}"


run()

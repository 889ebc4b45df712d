import re
from typing import Literal

import openai
from features import ADAPTER, ANSWER, HELLO, MODEL, SEEN, THINKING, THOUGHT, URL, WEATHER, feature, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
thinking = client.with_options(base_url=f"{THINKING}/v1")
MESSAGES = [{"role": "user", "content": HELLO}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}}
FLAT_TOOL = {"type": "function", **TOOL["function"], "strict": True}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


@feature("completions", "answer")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, logprobs=2)
    assert answer.choices[0].text and answer.usage.completion_tokens == 8


@feature("completions", "stream")
def _() -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks)


@feature("chat", "answer")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content


@feature("chat", "stream")
def _() -> None:
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage.completion_tokens


@feature("chat", "tools")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    City.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    told = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(model=MODEL, messages=told, tools=[TOOL], max_tokens=20).choices


@feature("chat", "tools, streamed")
def _() -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    City.model_validate_json(call.function.arguments)
    assert kinds.count("tool_calls.function.arguments.delta") > 1, "all arguments came in one delta"


@feature("chat", "format")
def _() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
    assert answer.choices[0].message.parsed.city


@feature("chat", "format and tools")
def _() -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "strict": True}}]
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, tools=tools)
    assert answer.choices[0].message.parsed or answer.choices[0].message.tool_calls


@feature("chat", "reasoning")
def _() -> None:
    message = thinking.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
    chunks = thinking.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == THOUGHT
    told = [*MESSAGES, message.model_dump(exclude_none=True), *MESSAGES]
    assert thinking.chat.completions.create(model=MODEL, messages=told).choices[0].message.content == SEEN


@feature("chat", "constraint")
def _() -> None:
    for constraint, wanted in (({"choice": ["Paris", "Rome"]}, r"Paris|Rome"), ({"regex": "[0-9]{3}"}, "[0-9]{3}")):
        extra = {"structured_outputs": constraint}
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra).choices[0].message.content
        assert re.fullmatch(wanted, answer), answer


if ADAPTER:

    @feature("chat", "adapter")
    def _() -> None:
        assert ADAPTER in [model.id for model in client.models.list()]
        answers = {
            name: client.chat.completions.create(model=name, messages=MESSAGES, temperature=0, max_tokens=20)
            for name in (MODEL, ADAPTER)
        }
        assert answers[ADAPTER].model == ADAPTER
        assert answers[ADAPTER].choices[0].message.content != answers[MODEL].choices[0].message.content


@feature("responses", "answer")
def _() -> None:
    answer = client.responses.create(model=MODEL, input=HELLO, instructions="Be brief.", max_output_tokens=100)
    assert answer.output_text and answer.usage.output_tokens


@feature("responses", "stream")
def _() -> None:
    events = list(client.responses.create(model=MODEL, input=MESSAGES, stream=True, max_output_tokens=100))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")


@feature("responses", "tools")
def _() -> None:
    answer = client.responses.create(model=MODEL, input=HELLO, tools=[FLAT_TOOL], tool_choice="required")
    (call,) = [item for item in answer.output if item.type == "function_call"]
    City.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    told = [*MESSAGES, *answer.output, output]
    assert client.responses.create(model=MODEL, input=told, tools=[FLAT_TOOL], max_output_tokens=20).output


@feature("responses", "tools, streamed")
def _() -> None:
    with client.responses.stream(model=MODEL, input=HELLO, tools=[FLAT_TOOL], tool_choice="required") as stream:
        kinds = [event.type for event in stream]
    assert "response.function_call_arguments.done" in kinds, kinds
    assert kinds.count("response.function_call_arguments.delta") > 1, "all arguments came in one delta"


@feature("responses", "format")
def _() -> None:
    assert client.responses.parse(model=MODEL, input=HELLO, text_format=City).output_parsed.city


@feature("responses", "format and tools")
def _() -> None:
    answer = client.responses.parse(model=MODEL, input=HELLO, text_format=City, tools=[FLAT_TOOL])
    assert answer.output_parsed or answer.output[-1].type == "function_call"


@feature("responses", "reasoning")
def _() -> None:
    answer = thinking.responses.create(model=MODEL, input=HELLO, include=["reasoning.encrypted_content"])
    assert (answer.output[0].content[0].text, answer.output_text) == (THOUGHT, ANSWER)
    events = list(thinking.responses.create(model=MODEL, input=HELLO, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHT
    told = [*MESSAGES, *answer.output, *MESSAGES]
    assert thinking.responses.create(model=MODEL, input=told).output_text == SEEN
    assert thinking.responses.create(model=MODEL, input="Why?", previous_response_id=answer.id).output_text == SEEN


@feature("responses", "state")
def _() -> None:
    first = client.responses.create(model=MODEL, input=HELLO, max_output_tokens=20)
    client.responses.create(model=MODEL, input="And 5 more?", previous_response_id=first.id, max_output_tokens=20)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


@feature("embeddings", "answer")
def _() -> None:
    answer = client.embeddings.create(model=MODEL, input=["a fox", "a lantern"])  # as base64, the client's default
    assert len(answer.data) == 2 and abs(sum(x * x for x in answer.data[0].embedding) - 1) < 1e-3


run()

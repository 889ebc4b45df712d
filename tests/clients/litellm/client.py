import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads its table of prices

import litellm
from features import ANSWER, HELLO, MODEL, THINKING, THOUGHT, URL, WEATHER, feature, run

litellm.telemetry = False
MESSAGES = [{"role": "user", "content": HELLO}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": WEATHER, "strict": True}}


def register(provider: str) -> None:
    settings = {"api_base": f"{URL}/v1", "api_key": "none", "model": f"{provider}/{MODEL}", "num_retries": 0, "timeout": 60}

    @feature(provider, "answer")
    def _() -> None:
        assert litellm.completion(messages=MESSAGES, max_tokens=100, **settings).choices[0].message.content

    @feature(provider, "stream")
    def _() -> None:
        chunks = list(litellm.completion(messages=MESSAGES, max_tokens=100, stream=True, **settings))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    @feature(provider, "tools")
    def _() -> None:
        answer = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", **settings)
        assert "city" in answer.choices[0].message.tool_calls[0].function.arguments

    @feature(provider, "format")
    def _() -> None:
        assert "city" in litellm.completion(messages=MESSAGES, response_format=FORMAT, **settings).choices[0].message.content

    @feature(provider, "format and tools")
    def _() -> None:
        message = litellm.completion(messages=MESSAGES, response_format=FORMAT, tools=[TOOL], **settings).choices[0].message
        assert message.tool_calls or "city" in message.content

    @feature(provider, "reasoning")
    def _() -> None:
        there = {**settings, "api_base": f"{THINKING}/v1"}
        message = litellm.completion(messages=MESSAGES, **there).choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
        deltas = [chunk.choices[0].delta for chunk in litellm.completion(messages=MESSAGES, stream=True, **there)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT

    @feature("embeddings", "answer")
    def _() -> None:
        assert len(litellm.embedding(input=["a fox", "a lantern"], **settings).data) == 2


for name in ("openai", "hosted_vllm"):
    register(name)


@feature("responses", "answer")
def _() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", input=HELLO, api_base=f"{URL}/v1", api_key="none", max_output_tokens=50, timeout=60
    )
    assert answer.output


@feature("messages", "answer")
def _() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", messages=MESSAGES, api_base=URL, api_key="none", max_tokens=50, timeout=60
    )
    assert answer.choices[0].message.content


run()

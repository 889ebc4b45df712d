from typing import Any, Literal

from features import ANSWER, HELLO, MODEL, SEEN, THINKING, THOUGHT, URL, feature, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return "sunny"


def chat(api: str, url: str = URL, **options: Any) -> ChatOpenAI:
    responses = api == "responses"
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0, timeout=60, use_responses_api=responses, **options
    )


def register(api: str) -> None:
    @feature(api, "answer")
    def _() -> None:
        assert chat(api, max_tokens=100).invoke(HELLO).text

    @feature(api, "stream")
    def _() -> None:
        assert "".join(chunk.text for chunk in chat(api, max_tokens=100).stream(HELLO))

    @feature(api, "tools")
    def _() -> None:
        answer = chat(api).bind_tools([weather], tool_choice="required").invoke(HELLO)
        call = answer.tool_calls[0]
        assert call["args"]["city"] in ("Paris", "Rome")
        told = [HumanMessage(HELLO), answer, ToolMessage("sunny", tool_call_id=call["id"])]
        chat(api, max_tokens=20).bind_tools([weather]).invoke(told)

    @feature(api, "format")
    def _() -> None:
        for method in ("json_schema", "function_calling"):
            assert chat(api).with_structured_output(City, method=method).invoke(HELLO).city, method

    @feature(api, "format and tools")
    def _() -> None:
        answer = chat(api).with_structured_output(City, tools=[weather], include_raw=True, strict=True).invoke(HELLO)
        assert answer["parsed"] or answer["raw"].tool_calls


for name in ("chat", "responses"):
    register(name)


@feature("responses", "reasoning")
def _() -> None:
    model = chat("responses", THINKING, include=["reasoning.encrypted_content"])
    answer = model.invoke(HELLO)
    (thought,) = [block for block in answer.content if block["type"] == "reasoning"]
    assert (thought["content"][0]["text"], answer.text) == (THOUGHT, ANSWER)
    assert model.invoke([HumanMessage(HELLO), answer, HumanMessage(HELLO)]).text == SEEN


@feature("embeddings", "answer")
def _() -> None:
    vectors = OpenAIEmbeddings(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, check_embedding_ctx_length=False
    )
    assert len(vectors.embed_documents(["a fox", "a lantern"])) == 2


run()

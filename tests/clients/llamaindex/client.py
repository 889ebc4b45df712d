from typing import Literal

from features import HELLO, MODEL, URL, feature, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SETTINGS = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 60, "context_window": 1024}
llm = OpenAILike(**SETTINGS, is_chat_model=True, is_function_calling_model=True, max_tokens=100)
MESSAGES = [ChatMessage(role="user", content=HELLO)]


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return "sunny"


@feature("completions", "answer")
def _() -> None:
    assert OpenAILike(**SETTINGS, max_tokens=20).complete("Once upon a time").text


@feature("completions", "stream")
def _() -> None:
    assert list(OpenAILike(**SETTINGS, max_tokens=20).stream_complete("Once upon a time"))[-1].text


@feature("chat", "answer")
def _() -> None:
    assert llm.chat(MESSAGES).message.content


@feature("chat", "stream")
def _() -> None:
    assert list(llm.stream_chat(MESSAGES))[-1].message.content


@feature("chat", "tools")
def _() -> None:
    answer = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=HELLO, tool_required=True)
    assert llm.get_tool_calls_from_response(answer)[0].tool_kwargs["city"] in ("Paris", "Rome")


@feature("chat", "format")
def _() -> None:
    assert llm.as_structured_llm(City).chat(MESSAGES).raw.city  # by a tool
    formatted = OpenAILike(**SETTINGS, is_chat_model=True, should_use_structured_outputs=True, max_tokens=100)
    assert formatted.as_structured_llm(City).chat(MESSAGES).raw.city


@feature("embeddings", "answer")
def _() -> None:
    vectors = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none", max_retries=0)
    assert len(vectors.get_text_embedding_batch(["a fox", "a lantern"])) == 2


run()

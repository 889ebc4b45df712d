from typing import Any, Literal

from anthropic import AsyncAnthropic
from features import HELLO, MODEL, URL, feature, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return "sunny"


def model(api: str) -> Any:
    if api == "messages":
        client = AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
        return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    return kind(MODEL, provider=OpenAIProvider(openai_client=client))


def agent(api: str, **options: Any) -> Agent:
    return Agent(model(api), instructions="Be brief.", model_settings={"max_tokens": 100}, retries=3, **options)


def register(api: str) -> None:
    @feature(api, "answer")
    async def _() -> None:
        assert (await agent(api).run(HELLO)).output

    @feature(api, "stream")
    async def _() -> None:
        async with agent(api).run_stream(HELLO) as result:
            assert [text async for text in result.stream_text()]

    @feature(api, "tools")  # a typed output is a tool that must be called
    async def _() -> None:
        assert (await agent(api, output_type=ToolOutput(City)).run(HELLO)).output.city

    if api == "messages":  # the library uses formats only with models that it knows
        return

    @feature(api, "format")
    async def _() -> None:
        assert (await agent(api, output_type=NativeOutput(City)).run(HELLO)).output.city

    @feature(api, "format and tools")
    async def _() -> None:
        assert (await agent(api, output_type=NativeOutput(City), tools=[weather]).run(HELLO)).output.city


for name in ("chat", "responses", "messages"):
    register(name)
run()

import os

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # tracing would send to OpenAI

from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from features import HELLO, MODEL, URL, feature, run
from openai import AsyncOpenAI
from pydantic import BaseModel

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    seen.append(city)
    return "sunny"


seen: list[str] = []


def agent(api: str, **options: Any) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    options.setdefault("model_settings", ModelSettings(max_tokens=100))
    return Agent(name="a", instructions="Be brief.", model=MODELS[api](MODEL, client), **options)


def register(api: str) -> None:
    @feature(api, "answer")
    async def _() -> None:
        assert (await Runner.run(agent(api), HELLO)).final_output

    @feature(api, "stream")
    async def _() -> None:
        result = Runner.run_streamed(agent(api), HELLO)
        assert [event async for event in result.stream_events()] and result.final_output

    @feature(api, "tools")
    async def _() -> None:
        seen.clear()
        forced = ModelSettings(max_tokens=100, tool_choice="required")  # only for the first turn
        await Runner.run(agent(api, tools=[weather], model_settings=forced), HELLO, max_turns=4)
        assert seen

    @feature(api, "format")
    async def _() -> None:
        assert (await Runner.run(agent(api, output_type=City), HELLO)).final_output.city

    @feature(api, "format and tools")
    async def _() -> None:
        assert (await Runner.run(agent(api, output_type=City, tools=[weather]), HELLO, max_turns=6)).final_output.city


for name in MODELS:
    register(name)
run()

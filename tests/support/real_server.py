"""What the tests of a whole server share: its model, that model without a server, and requests to it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from comms import Local
from engine import LLM, SamplingParams
from tests import ROOT
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer
from tp import World

NAME = "tiny-hybrid"
PROMPT = "Once upon a time"
STORY: Any = [{"role": "user", "content": "Tell me about a child."}]
SUM = [{"role": "user", "content": "What is 27 plus 48?"}]
CLIENTS = ROOT / "tests" / "clients"
LONG = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}  # runs until it is stopped

Complete = Callable[..., Any]


class Reference:
    """The same checkpoint without a server: one rank, one prompt."""

    def __init__(self, path: str) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(path)
        world = World(0, 1, torch.device("cpu"), Local())
        self.model = load_model(path, model_config(path, None, 1), world, torch.float32)
        self.llm = LLM(self.model, self.tokenizer, world)

    def generate(self, prompt: list[int], count: int, **params: Any) -> list[int]:
        sampling = SamplingParams(**({"max_tokens": count, "temperature": 0.0, "ignore_eos": True} | params))
        return self.llm.generate([prompt], sampling)[0].token_ids

    def score(self, prompt: list[int]) -> tuple[list[float | None], list[int]]:
        scores = self.llm.score(prompt)
        return scores.logprobs, scores.argmax

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def at_once(function: Callable[..., Any], *params: dict[str, Any]) -> list[Any]:
    """`function(**each)` for each of the params, at the same time: the requests share the engine's steps. Streams are read to
    their ends."""

    def call(params: dict[str, Any]) -> Any:
        return list(function(**params)) if params.get("stream") else function(**params)

    with ThreadPoolExecutor(len(params)) as pool:
        return list(pool.map(call, params))


def ids_of(reply: Any) -> list[int]:
    found: list[int] = reply.choices[0].token_ids
    return found


def joined(chunks: list[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)

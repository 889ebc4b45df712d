"""Conversations that a model writes: kept batch by batch, and read by the tokenizer of training."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from engine import LLM, Completion
from tests import MODELS
from training import own_chats
from training.chat_data import encode_example, read_messages


def test_a_stopped_command_goes_on_with_the_chats_of_an_undisturbed_one(tmp_path: Path, seed: int) -> None:
    llm = LLM(MODELS / random.choice(("tiny-standard", "tiny-hybrid")))

    def written(name: str, tokens: int, first: int = 0) -> list[dict[str, Any]]:
        sizes = argparse.Namespace(out=tmp_path / name, tokens=tokens, length=256, batch=8, temperature=0.7, first=first)
        own_chats.write(llm, sizes)
        return [json.loads(line) for line in sizes.out.read_text().splitlines()]

    whole, few = written("whole", 400), written("parts", 1)
    assert sum(row["tokens"] for row in whole) >= 400 and few == whole[: len(few)] and len(few) < len(whole)
    (tmp_path / "parts").write_text((tmp_path / "parts").read_text() + '{"messages": [')  # as a kill leaves it
    assert written("parts", 400) == whole == written("parts", 400) and written("others", 1, 1000)[0] not in whole
    for row in whole:
        assert len(encode_example(llm.tokenizer, read_messages(row)).ids) <= row["tokens"] + 2 <= 258
    llm.chat = lambda talks, _: [Completion([1], [2], "cut off", "length") for _ in talks]  # type: ignore[method-assign,misc,assignment]
    assert next(own_chats.batches(llm, 256, 8, 0.7, 0)) == []
    llm.generate = None  # type: ignore[method-assign,assignment]
    assert written("whole", 400) == whole, "nothing is left to write"

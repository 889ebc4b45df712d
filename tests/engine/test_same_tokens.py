"""Answers with drafts have the tokens of those without, where logits have the same bits in every batch (--deterministic)."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from engine.protocol import Submit
from kernels import determinism
from tests.engine.test_drafts import JSON, bent_submits, draft_for, predicting
from tests.engine.test_engine import ALONE, Answer, config_of, engine_of, random_model, serve, tiny_tokenizer
from tests.engine.test_runner import LINES

VARIANTS = "standard", "parallel", "ladder", "hybrid:2", "mistral", "qwen3-some-layers"  # desync takes long
SOURCES = "ngram", "prediction", "itself", "parallel", "head"
# and arrivals before a step
LIMITS = ((dict(max_batch_tokens=13, max_num_seqs=4), 2), (dict(n_blocks=40, max_batch_tokens=32), 3))


@pytest.fixture
def _deterministic() -> Iterator[None]:
    determinism.enable(True)
    yield
    determinism.enable(False)


def submits_of(grammars: bool) -> list[Submit]:
    """Requests of all kinds, half of them under a grammar if there are some."""
    found = []
    for i, one in enumerate(bent_submits(6, max_tokens=random.randint(1, 32))):
        late = random.random() < 0.5
        under = dict(grammar=LINES if late else JSON, late_grammar=late) if grammars and i % 2 else {}
        found.append(msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, **under)))
    return found


def ends(answers: dict[str, Answer]) -> dict[str, tuple[list[int], str | None]]:
    return {name: (answer.tokens, answer.finish_reason) for name, answer in answers.items()}


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("place", range(2))
def test_the_bits_with_drafts_under_grammars_and_with_quantized_weights(
    place: int, in_turn: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    grammars, (limits, at_once), source = place == 0, in_turn(LIMITS, place), in_turn(SOURCES, place)
    config = replace(config_of(random.choice(VARIANTS)), max_seq_len=128)
    if grammars:
        config = replace(config, vocab_size=tiny_tokenizer().vocab_size)
    else:
        config = replace(config, head_dim=16, intermediate_size=320)  # large enough for groups of quantized weights
    save_checkpoint(random_model(config), tmp_path, torch.float32)
    quantized = model_config(str(tmp_path), None, 1, None if grammars else random.choice(["int8", "int4"]))
    model, settings = load_model(str(tmp_path), quantized, ALONE, torch.float32), dict(tokenizer=tiny_tokenizer(), **limits)
    submits = submits_of(grammars)
    plain = serve(engine_of(model, **settings), submits, at_once)
    if source == "prediction":
        submits = predicting(submits, plain)
    if source == "parallel":
        draft: Any = random_model(replace(config_of("parallel"), vocab_size=config.vocab_size))
    else:
        draft = None if source in ("ngram", "prediction") else draft_for(model, source)
    drafts = dict(draft=draft, draft_tokens=random.choice([1, 3, 7]), ngram_prompts=500 if source == "ngram" else 0)
    assert ends(serve(engine_of(model, **drafts, **settings), submits, at_once)) == ends(plain)

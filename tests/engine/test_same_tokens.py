"""A small part of `make same-tokens`, in every run with other cases."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.same_tokens import LIMITS, SOURCES, VARIANTS, Case, compare


@pytest.mark.parametrize("place", range(2))
def test_the_bits_with_drafts_under_grammars_and_with_quantized_weights(
    place: int, in_turn: Callable[..., Any], seed: int
) -> None:
    limits, at_once, _ = in_turn(LIMITS[2:4], place)
    case = replace(
        Case.of(random.randrange(10**6)),
        ranks=1,
        variant=random.choice([name for name in VARIANTS if "desync" not in name]),  # which takes long
        source=in_turn(SOURCES, place),
        exact=True,
        grammars=place == 0,
        quantize=random.choice(["int8", "int4"]) if place else None,
        limits=limits,
        at_once=at_once,
        prompts=6,
    )
    assert compare(case)["tokens"] > 0

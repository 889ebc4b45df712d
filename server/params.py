"""How the fields of a request become the engine's parameters. The only place that maps them."""

import random
import uuid
from collections.abc import Sequence

import msgspec

from engine.protocol import SamplingParams, Submit
from server.limits import check_ids
from server.schemas import INT64, GenerationBody
from tokenizer import Tokenizer

SMALLEST_TOP_P = 1e-9  # replaces top_p 0; keeps only the likeliest token


def make_params(
    body: GenerationBody,
    tokenizer: Tokenizer,
    vocab_size: int,
    max_tokens: Sequence[int],
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str | None,
) -> list[SamplingParams]:
    """The parameters of each prompt, whose answer has at most so many tokens. They differ in `max_tokens` and `min_tokens` only.

    Raises a 400 for an unknown token id.
    """
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
    check_ids(list(bias), vocab_size, "logit_bias")
    check_ids(body.allowed_token_ids or [], vocab_size, "allowed_token_ids")
    check_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids")
    eos_ids = [] if body.ignore_eos else tokenizer.eos_ids
    shared = SamplingParams(
        max_tokens=1,
        temperature=_given(body.temperature, 1.0),
        top_k=max(body.top_k or 0, 0),
        top_p=max(_given(body.top_p, 1.0), SMALLEST_TOP_P),
        min_p=body.min_p or 0.0,
        seed=random.getrandbits(62) if body.seed is None else body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=bias,
        allowed_token_ids=body.allowed_token_ids,
        stop_token_ids=sorted({*(body.stop_token_ids or []), *eos_ids}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        stop=list(body.stops),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
    )
    return [
        msgspec.structs.replace(shared, max_tokens=max(limit, 1), min_tokens=min(body.min_tokens or 0, limit))
        for limit in max_tokens
    ]


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def make_submits(prompts: Sequence[list[int]], params: Sequence[SamplingParams], choices: int) -> list[Submit]:
    """`choices` sequences for each prompt, with its `params`. Choice i samples with seed + i."""
    unique = uuid.uuid4().hex  # clients may use a request id of their own more than once
    submits = []
    for p, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        for i in range(choices):
            seed = (one.seed + i + INT64) % (2 * INT64) - INT64  # wraps around as a signed 64-bit number
            own = one if i == 0 else msgspec.structs.replace(one, seed=seed)
            submits.append(Submit(f"{unique}-{p * choices + i}", prompt, own))
    return submits

"""The sampler against a float64 reference, transformers' processors, the expected distribution, and SplitMix64 in Python."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine import SamplingParams, protocol
from engine.protocol import Submit, joined
from engine.sampler import SamplingBatch, keep, sample
from errors import UserError
from kernels.sampling import exponential_noise, hash64
from kernels.sampling import softmax as softmax_of_rows

CPU = torch.device("cpu")
WORD = 2**64
GREEDY = SamplingParams(temperature=0)

sampled = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1) | st.just(1.0),
    min_p=st.floats(0, 1) | st.just(0.0) | st.floats(-500, 0).map(math.exp),
    seed=st.integers(-(2**63), 2**63 - 1),
)
rows = st.lists(sampled, min_size=1, max_size=5)
seeds = st.integers(0, 2**32 - 1)


def random_logits(seed: int, count: int, vocab: int = 30) -> Tensor:
    """(count, vocab). Logits of a row differ by at least 1e-3, because a filter's choice among equal logits is arbitrary."""
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return logits + logits.argsort(-1).argsort(-1) * 1e-3


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def filtered(logits: Tensor, params: SamplingParams) -> tuple[np.ndarray, bool]:
    """The distribution that `params` define, computed in float64, filter by filter and token by token; and whether any token
    is so close to a threshold that float32 may decide differently.

    A float32 quotient by a float32 temperature has a relative error of 2^-23. The difference of two quotients has at most
    four times that error, which is also the relative error of a probability, apart from the rounding of sums of 30 numbers."""
    scaled = logits.double().numpy() / params.temperature
    p = softmax(scaled)
    error = 2**-21 * np.abs(scaled).max()
    order = sorted(range(len(p)), key=lambda i: -p[i])[: params.top_k or len(p)]
    left = {i: p[i] / sum(p[j] for j in order) for i in order}
    kept, before, close = [], 0.0, False
    for i in order:
        close |= abs(before - params.top_p) < error + 1e-5 and params.top_p < 1 and i != order[0]
        if before < params.top_p or params.top_p == 1:
            kept.append(i)
        before += left[i]
    if params.min_p:
        floor = math.log(params.min_p)
        below = {i: scaled[i] - scaled[order[0]] for i in kept}
        close |= any(abs(below[i] - floor) < error - 2**-22 * floor for i in kept[1:])
        kept = [i for i in kept if below[i] >= floor]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result, close


def survivors(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    batch = SamplingBatch.of(params, CPU)
    return keep(logits / batch.temperature, batch)


def draw(logits: Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    return sample(logits, SamplingBatch.of(params, CPU), torch.tensor(positions)[:, None]).tolist()


# --- the filters ---------------------------------------------------------------------------------------------------------


@given(rows, seeds)
@example([SamplingParams(temperature=0.0625, min_p=1.7553182589271873e-84)], 0)  # float32's smallest number is 1.4e-45
@settings(deadline=None)
def test_filters_keep_what_transformers_and_the_float64_reference_keep(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(seed, len(params))
    passes = survivors(logits, params)
    for row, p, row_passes in zip(logits, params, passes, strict=True):
        expected, close = filtered(row, p)
        scores = TemperatureLogitsWarper(p.temperature)(torch.empty(1, 0), row[None].double())
        if p.top_k:
            scores = TopKLogitsWarper(p.top_k)(torch.empty(1, 0), scores)
        if p.top_p < 1:
            scores = TopPLogitsWarper(p.top_p)(torch.empty(1, 0), scores)
        scores = MinPLogitsWarper(p.min_p)(torch.empty(1, 0), scores)
        if not close:
            assert row_passes.tolist() == scores[0].isfinite().tolist() == (expected > 0).tolist()


@given(seeds)
@settings(deadline=None)
def test_without_filters_every_token_passes_whatever_its_neighbours_ask(seed: int) -> None:
    peaked = random_logits(seed, 2, vocab=500) * 8  # fp32 cumulative sums reach 1 long before the last token
    passes = survivors(peaked, [SamplingParams(), SamplingParams(top_k=1)])
    assert passes.sum(-1).tolist() == [500, 1]


def whole_faults(device: str) -> list[str]:
    """Rows whose tokens that top-p keeps differ from fp64's, but at the limit, or depend on the other rows."""
    found, vocab = [], random.choice([1000, 5000, 130_001])
    logits = torch.randn(64, vocab, device=device) * torch.empty(64, 1, device=device).uniform_(0.5, 4)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = softmax_of_rows(ordered).double()  # rounded to fp32, as the sampler has them
    before = (probabilities.cumsum(-1) - probabilities).gather(-1, order.argsort(-1))
    # to a sum, so that its last bits matter
    close = [min(max(float(row[random.randrange(vocab)]), 1e-6), 0.999) for row in before]
    params = [SamplingParams(top_p=limit) for limit in close]
    passes = keep(logits, SamplingBatch.of(params, torch.device(device)))
    limits = torch.tensor([[p.top_p] for p in params], device=device).double()
    wrong = (passes != (before < limits)) & ((before - limits).abs() > 1e-10)
    if wrong.any():
        found.append(f"{int(wrong.sum())} of {vocab} tokens are not those of fp64")
    for count in (1, 2):
        rows = [random.randrange(64) for _ in range(count)]
        if not torch.equal(keep(logits[rows], SamplingBatch.of([params[i] for i in rows], torch.device(device))), passes[rows]):
            found.append(f"rows {rows} keep others than in a batch of 64")
    return found


def test_top_p_keeps_what_fp64_keeps_in_batches_of_every_size(seed: int) -> None:
    assert whole_faults("cpu") == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_top_p_keeps_the_same_in_batches_of_every_size_on_a_gpu(seed: int) -> None:
    with torch.inference_mode():
        for _ in range(20):
            assert whole_faults("cuda") == []


@pytest.mark.parametrize("min_p", [0.3, 1e-30, 1e-42, 1e-84, 5e-324])
def test_a_min_p_of_any_size_drops_what_lies_further_below_the_likeliest_than_its_logarithm(min_p: float) -> None:
    below = math.log(min_p)
    logits = 5 + torch.tensor([[below - 0.01, 0, below + 0.01, -torch.inf]])
    assert survivors(logits, [SamplingParams(min_p=min_p)]).tolist() == [[False, True, True, False]]
    assert survivors(logits, [SamplingParams()]).all()


@pytest.mark.parametrize("given", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_filter_is_one_of_drafts_too(given: dict[str, float]) -> None:
    params = SamplingParams(**given, temperature=0.5, seed=3, presence_penalty=1.0, max_tokens=9)  # type: ignore[arg-type]
    assert params.is_filtered and not SamplingParams(temperature=0.5, presence_penalty=1.0).is_filtered
    assert params.of_draft() == SamplingParams(**given, temperature=0.5, seed=3)  # type: ignore[arg-type]


def test_equal_logits_do_not_let_more_than_k_through() -> None:
    assert survivors(torch.zeros(1, 50), [SamplingParams(top_k=7)]).sum() == 7


@given(rows, seeds)
@settings(deadline=None)
def test_the_likeliest_token_always_passes(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(seed, len(params))
    assert survivors(logits, params).gather(1, logits.argmax(-1, keepdim=True)).all()


# --- drawn tokens --------------------------------------------------------------------------------------------------------


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether the statistic is below its quantile for p = 1e-9 (Wilson & Hilferty). The rarest tokens share a bin with an
    expected count of at least 10, because a single draw of a very rare token would exceed any quantile."""
    order = np.argsort(probabilities)
    observed, expected = counts[order], probabilities[order] * counts.sum()
    rare = int(np.searchsorted(np.minimum(expected.cumsum(), 10), 10)) + 1
    observed, expected = (np.append(x[rare:], x[:rare].sum()) for x in (observed, expected))
    degrees = max(1, len(expected) - 1)
    limit = degrees * (1 - 2 / (9 * degrees) + 6 * math.sqrt(2 / (9 * degrees))) ** 3
    return bool(((observed - expected) ** 2 / expected).sum() < limit)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.5, top_k=9),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.2, min_p=0.05),
        SamplingParams(temperature=1.7, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_frequencies_over_positions_follow_the_filtered_distribution(params: SamplingParams, seed: int) -> None:
    draws = 20_000
    logits = random_logits(seed, 1)
    expected, _ = filtered(logits[0], params)
    batch = SamplingBatch.of([replace(params, seed=seed)] * draws, CPU)
    first = random.randrange(2**30)
    positions = torch.arange(first, first + draws)[:, None]
    counts = np.bincount(sample(logits.expand(draws, -1), batch, positions).numpy(), minlength=30)
    assert counts[expected == 0].sum() == 0
    assert chi_square_is_plausible(counts, expected)


def test_frequencies_over_seeds_follow_the_distribution(seed: int) -> None:
    draws = 20_000
    logits = random_logits(seed, 1)
    batch = SamplingBatch.of([SamplingParams(seed=seed + i) for i in range(draws)], CPU)
    tokens = sample(logits.expand(draws, -1), batch, torch.full((draws, 1), random.randrange(4096)))
    counts = np.bincount(tokens.numpy(), minlength=30)
    assert chi_square_is_plausible(counts, softmax(logits[0].double().numpy()))


def test_the_chi_square_test_notices_another_distribution(seed: int) -> None:
    logits = random_logits(seed, 1)[0] / 3  # flatter logits: with one dominant token the temperature would hardly matter
    expected, _ = filtered(logits, SamplingParams())
    wrong, _ = filtered(logits, SamplingParams(temperature=1.3))
    counts = np.bincount(np.random.default_rng(seed).choice(30, 20_000, p=wrong), minlength=30)
    assert not chi_square_is_plausible(counts, expected)


@given(st.lists(sampled | st.just(GREEDY), min_size=1, max_size=8), seeds, st.randoms())
@settings(deadline=None)
def test_a_sequence_draws_the_same_alone_and_anywhere_in_a_batch(
    params: list[SamplingParams], seed: int, rng: random.Random
) -> None:
    logits = random_logits(seed, len(params))
    positions = [rng.randrange(10_000) for _ in params]
    alone = [draw(row[None], [p], [at])[0] for row, p, at in zip(logits, params, positions, strict=True)]
    order = rng.sample(range(len(params)), len(params))
    together = draw(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert together == [alone[i] for i in order]


@given(rows, seeds)
@settings(deadline=None)
def test_greedy_rows_take_the_likeliest_token_whatever_their_neighbours_do(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(seed, 2 * len(params))
    mixed = [p for pair in zip(params, [GREEDY] * len(params), strict=True) for p in pair]
    tokens = draw(logits, mixed, list(range(len(mixed))))
    assert tokens[1::2] == logits.argmax(-1).tolist()[1::2]
    assert draw(logits, [GREEDY] * len(mixed), list(range(len(mixed)))) == logits.argmax(-1).tolist()


def test_another_seed_or_position_draws_other_tokens(seed: int) -> None:
    flat = torch.zeros(1, 1000)
    positions = list(range(50))
    first = draw(flat.expand(50, -1), [SamplingParams(seed=seed)] * 50, positions)
    second = draw(flat.expand(50, -1), [SamplingParams(seed=seed + 1)] * 50, positions)
    assert len(set(first)) > 40  # 50 draws from 1000 tokens: 48.8 distinct ones are expected
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 5


# --- the noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_exponential_and_independent(seed: int) -> None:
    count = 1000
    seeds = torch.arange(seed, seed + count)[:, None]
    noise = exponential_noise(seeds, torch.full((count, 1), 7), torch.arange(count)).double()
    # the error of a mean of n numbers is sigma / sqrt(n); the fourth central moment of Exp(1) is 9
    assert abs(noise.mean() - 1) < 6 / count
    assert abs(noise.var() - 1) < 6 * math.sqrt(8) / count
    assert abs((noise > 3).double().mean() - math.exp(-3)) < 6 * math.sqrt(math.exp(-3)) / count
    positions = exponential_noise(torch.full((count, 1), seed), torch.arange(count)[:, None], torch.arange(count)).double()
    for field in (noise, positions):
        for a, b in ((field[1:], field[:-1]), (field[:, 1:], field[:, :-1]), (field, field.T)):
            assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 8 / count
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), positions.flatten())))[0, 1]) < 6 / count


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def invert_splitmix64(x: int) -> int:
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9)):
        x = undo_shift(x, shift) * pow(factor, -1, WORD) % WORD
    return (undo_shift(x, 30) - 0x9E3779B97F4A7C15) % WORD


def undo_shift(x: int, shift: int) -> int:
    """The y with y ^ (y >> shift) == x."""
    return x ^ (x >> shift) ^ (x >> 2 * shift)


def signed(x: int) -> int:
    return x - WORD if x >= 2**63 else x


@given(st.lists(st.integers(0, WORD - 1), min_size=1))
@example([0, 1, 2**63 - 1, 2**63, WORD - 1])
@settings(deadline=None)
def test_hash64_is_splitmix64(numbers: list[int]) -> None:
    hashed = hash64(torch.tensor([signed(x) for x in numbers]))
    assert [x % WORD for x in hashed.tolist()] == [splitmix64(x) for x in numbers]
    assert [invert_splitmix64(splitmix64(x)) for x in numbers] == numbers


def test_splitmix64_published_values() -> None:
    """The first outputs of the generator with seed 1234567. Its state advances by the constant that the hash adds."""
    state, expected = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(state + i * 0x9E3779B97F4A7C15) for i in range(3)] == expected


@given(st.integers(0, 2**20), st.integers(0, 29), st.sampled_from([0, 1, 2**31, 2**32 - 2, 2**32 - 1]), st.booleans())
@settings(deadline=None)
def test_the_rarest_noise_still_leaves_a_filtered_token_its_place(position: int, token: int, high: int, only: bool) -> None:
    """The seed is computed backwards so that `high` is the upper 32 bits of the hash of (seed, position, token)."""
    inner = invert_splitmix64((high << 32) | 12345) ^ token
    seed = signed(invert_splitmix64(invert_splitmix64(inner) ^ position))
    noise = exponential_noise(torch.tensor([[seed]]), torch.tensor([[position]]), torch.arange(30))
    assert noise.isfinite().all() and (noise > 0).all()
    assert noise[0, token] == pytest.approx(-math.log1p(-(high + 0.5) / 2**32) if high < 2**32 - 2 else 17, rel=0.1)
    logits = torch.zeros(1, 30)
    logits[0, token] = 5.0
    params = SamplingParams(top_k=1, seed=seed) if only else SamplingParams(min_p=0.9, seed=seed)
    assert draw(logits, [params], [position]) == [token]


# --- parameters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1]),
        ("temperature", [-1, -0.001, 101, math.inf, math.nan]),
        ("top_k", [-1, -50, 2**63]),
        ("top_p", [0, -0.5, 1.01, math.nan]),
        ("min_p", [-0.01, 1.5, math.nan]),
        ("seed", [2**63, -(2**63) - 1]),
    ],
)
def test_invalid_parameters_are_named(name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(UserError, match=rf"^{name} must be .*, not ") as error:
            SamplingParams(**{name: value})
        assert str(value) in str(error.value)


def test_limits_are_valid(seed: int) -> None:
    logits = random_logits(seed, 1)
    for p in (
        SamplingParams(temperature=100, top_k=2**63 - 1, top_p=1.0, min_p=1.0, seed=2**63 - 1),
        SamplingParams(temperature=1e-30, top_p=1e-30, seed=-(2**63)),
    ):
        assert draw(logits, [p], [0]) == [int(logits.argmax())]


def test_what_many_answers_share_is_checked_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A check of all parameters takes a millisecond for a thousand biases, and a request may have a thousand answers."""
    params = SamplingParams(logit_bias=dict.fromkeys(range(1024), 0.5), max_tokens=7, seed=2**63 - 2, stop=["a"])
    each = [replace(params, max_tokens=i + 1, min_tokens=i, seed=random.randrange(2**63)) for i in range(20)]
    wrapped = [replace(params, seed=value) for value in (2**63 - 2, 2**63 - 1, -(2**63), 1 - 2**63)]

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(protocol, "check_types", fail)
    assert [params.of_answer(i) for i in range(4)] == wrapped and params.seed == 2**63 - 2
    submits = [Submit(f"r{i}", [1, 2], one) for i, one in enumerate(each)]
    assert joined(submits).submits() == submits

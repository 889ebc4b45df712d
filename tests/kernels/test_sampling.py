"""Tokens sampled from shards of the vocabulary equal those that the sampler samples from the whole vocabulary."""

import math
import random
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import SamplingParams
from engine.sampler import SamplingBatch, sample
from kernels import sampling
from kernels.sampling import NO_TOKEN, SLICE, combine_best_reference, exponential_noise, local_best_reference, pack
from tests.support.kernels import kernels_always
from tests.support.ranks import Ranks


def draw(local: Callable, combine: Callable, logits: Tensor, per_row: tuple[Tensor, ...], ranks: int, limit: int) -> Tensor:
    """The tokens that `ranks` ranks draw, each from its part of the logits."""
    size = logits.shape[1] // ranks
    parts = [local(logits[:, i * size : (i + 1) * size], *per_row, i * size, limit) for i in range(ranks)]
    return combine(torch.cat(parts, dim=-1))


def faults_of(local: Callable, combine: Callable, device: str, dtype: torch.dtype) -> list[str]:
    """The cases in which a token differs from the sampler's on the same device."""
    found = []
    for ranks in (1, 2, 4):
        batch, limit = random.randint(1, 5), random.randint(1, 3 * SLICE)
        vocab = -(-limit // ranks) * ranks  # the last rank's part may be padded
        params = [
            SamplingParams(temperature=random.choice([0, 0.01, 0.7, 1, 5]), seed=random.randrange(-(2**63), 2**63))
            for _ in range(batch)
        ]
        logits = (torch.randn(batch, vocab) * random.choice([0.1, 1, 10])).to(device, dtype)
        logits[:, limit:] = torch.inf  # must never be drawn
        logits[0] = logits[0].round()  # ties
        broken = random.randrange(batch) if random.random() < 0.5 else None
        if broken is not None:
            logits[broken, random.randrange(limit)] = random.choice([torch.nan, torch.inf])
            logits[broken, :limit] = random.choice([logits[broken, :limit], torch.full((limit,), -torch.inf)])
        positions = torch.randint(0, 100000, (batch, 1), device=device)
        everything = SamplingBatch.of(params, torch.device(device))
        expected = sample(logits[:, :limit].float(), everything, positions).tolist()
        per_row = everything.temperature[:, 0], everything.seed[:, 0], positions[:, 0]
        got = draw(local, combine, logits, per_row, ranks, limit).tolist()
        found += [
            f"row {row} has token {token}" for row, token in enumerate(expected) if (token == NO_TOKEN) != (row == broken)
        ]
        found += [
            f"{ranks} ranks, {limit} ids, {params[row]}, position {positions[row, 0]}: {got[row]}, not {expected[row]}"
            for row in range(batch)
            if got[row] != expected[row]
        ]
    return found


def noise_faults(device: str) -> list[str]:
    """Where the noise of the kernels is not the logarithm of the hash, and where the two kernels' noise has different bits."""
    found, size = [], 8 * SLICE + random.randrange(1, SLICE)
    seeds, positions = (torch.randint(-(2**63), 2**63 - 1, (3, 1)).to(device) for _ in range(2))
    ids = torch.arange(size, device=device)
    noise = sampling.gumbel_noise(seeds, positions, ids)
    exact = -exponential_noise(seeds, positions, ids).double().log()
    if ((noise - exact).abs() > 1e-6 + 2e-7 * exact.abs()).any():
        found.append("the noise is not minus the logarithm")
    part = sorted(random.sample(range(size), 2))
    if not torch.equal(
        sampling.gumbel_noise(seeds[1:2], positions[1:2], ids[part[0] : part[1]])[0], noise[1, part[0] : part[1]]
    ):
        found.append("the noise depends on the place")
    # each key shows one score: that of its slice's only id with a finite logit
    logits = torch.full((3, size), -torch.inf, device=device)
    shown = torch.arange(0, size, SLICE, device=device) + random.randrange(size % SLICE)
    logits[:, shown] = 0.0
    keys = sampling.local_best(logits, torch.ones(3, device=device), seeds[:, 0], positions[:, 0], 0, size)
    if not torch.equal(keys, pack(noise[:, shown], shown)):
        found.append("the scores have other noise")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_draws_what_the_sampler_draws(dtype: torch.dtype, seed: int) -> None:
    for _ in range(10):
        assert faults_of(local_best_reference, combine_best_reference, "cpu", dtype) == []


any_score = st.floats(width=32)


def above(a: float, b: float) -> bool:
    return (math.isnan(a) and not math.isnan(b)) or a > b


@settings(max_examples=300, deadline=None)
@given(scores=st.tuples(any_score, any_score), ids=st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
def test_keys_sort_by_score_and_then_lowest_id(scores: tuple[float, float], ids: tuple[int, int]) -> None:
    keys = pack(torch.tensor(scores), torch.tensor(ids))
    first, second = (scores[0], ids[0], int(keys[0])), (scores[1], ids[1], int(keys[1]))
    if not (above(first[0], second[0]) or above(second[0], first[0])):
        assert (first[2] > second[2]) == (first[1] < second[1])
    else:
        assert (first[2] > second[2]) == above(first[0], second[0])
    assert combine_best_reference(keys[:1, None]).item() == (ids[0] if math.isfinite(scores[0]) else NO_TOKEN)


def test_a_key_by_hand() -> None:
    (bits,) = struct.unpack("<i", struct.pack("<f", 1.5))
    assert pack(torch.tensor([1.5]), torch.tensor([7])).item() == (bits << 32) | (2**32 - 8)


@pytest.mark.parametrize("hashed", [0, -1])
def test_noise_of_the_least_and_largest_hash_is_finite(hashed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "hash64", lambda x: torch.full_like(x, hashed))
    noise = exponential_noise(*(torch.zeros(1, 1, dtype=torch.int64) for _ in range(2)), torch.zeros(3, dtype=torch.int64))
    assert (noise > 0).all() and (noise < 20).all() and noise.log().isfinite().all()


def test_nothing_but_padding_draws_nothing_below_the_limit(seed: int) -> None:
    """A rank whose part is only padding must lose against every finite score."""
    zeros = torch.zeros(1, dtype=torch.int64)
    padding = local_best_reference(torch.full((1, 50), 1e30), torch.zeros(1), zeros, zeros, 100, 100)
    real = local_best_reference(torch.full((1, 100), -1e30), torch.zeros(1), zeros, zeros, 0, 100)
    assert combine_best_reference(torch.cat((padding, real), dim=-1)).item() == 0


def faults(seed: int, device: str, rounds: int) -> list[str]:
    torch.manual_seed(seed)
    random.seed(seed)
    found = []
    special = torch.tensor([[0.0, -0.0], [-torch.inf, -torch.inf], [1.0, torch.nan], [torch.inf, torch.nan]], device=device)
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    with kernels_always(sampling):
        for _ in range(rounds):
            for dtype in (torch.float32, torch.bfloat16):
                found += faults_of(sampling.local_best, sampling.combine_best, device, dtype)
            found += noise_faults(device)
        got = sampling.local_best(special, torch.zeros(4, device=device), zeros, zeros, 0, 2)
    if not torch.equal(got, local_best_reference(special, torch.zeros(4, device=device), zeros, zeros, 0, 2)):
        found.append("zeros, infinities or NaN")
    return found


def test_kernels_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(faults, seed, "cpu", 2) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu(seed: int) -> None:
    assert faults(seed, "cuda", 5) == []

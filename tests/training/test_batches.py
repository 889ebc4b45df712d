"""The order of windows and the content of batches, against the definition: plain slices of the written array."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import UserError
from tests.training.test_token_file import numbered
from training.batches import IGNORED, GlobalBatches, order
from training.token_file import open_tokens, write_tokens


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(1, 9), size=st.integers(1, 6), extra=st.integers(0, 60), packed=st.booleans(), data=st.data())
def test_an_epoch_has_no_window_twice(
    length: int, size: int, extra: int, packed: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By definition, dense windows begin every `length` tokens and predict every token except the first; packed windows
    follow one another without overlap. An epoch has different windows, as many as fill whole batches."""
    stride = length + 1 if packed else length
    count = stride * (size - 1) + length + 1 + extra
    file = numbered(tmp_path_factory.mktemp("data"), count, None, length + 1 if packed else None)
    batches = GlobalBatches(file, length, size, data.draw(st.integers(0, 2**40)))
    starts = [start for start in range(0, count, stride) if start + length + 1 <= count]
    assert batches.windows == len(starts) and batches.steps_per_epoch == len(starts) // size
    first = data.draw(st.integers(0, 3)) * batches.steps_per_epoch
    seen = []
    for step in range(first, first + batches.steps_per_epoch):
        batch = batches.micro_batch(step, 0, size)
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert inputs == list(range(inputs[0], inputs[0] + length)) and targets == [i + 1 for i in inputs]
            seen.append(inputs[0])
    assert len(set(seen)) == len(seen) == len(starts) // size * size and set(seen) <= set(starts)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_the_global_batch_does_not_depend_on_the_ranks(world_size: int, micro_batch: int, tmp_path: Path, seed: int) -> None:
    mask = np.random.default_rng(seed).integers(2, size=5000)
    file = numbered(tmp_path, 5000, mask)
    for step in random.sample(range(100), 5):
        whole = GlobalBatches(file, 20, 24, seed).micro_batch(step, 0, 24)
        mine = [GlobalBatches(file, 20, 24, seed) for _ in range(world_size)]
        parts, counted = {}, 0
        for rank, batches in enumerate(mine):
            for number in range(24 // (world_size * micro_batch)):
                index = number * world_size + rank
                parts[index] = batches.micro_batch(step, index, micro_batch)
                assert parts[index].inputs.shape == parts[index].targets.shape == (micro_batch, 20)
                counted += int((parts[index].targets != IGNORED).sum())
        assert torch.equal(torch.cat([parts[i].inputs for i in range(len(parts))]), whole.inputs)
        assert torch.equal(torch.cat([parts[i].targets for i in range(len(parts))]), whole.targets)
        assert {batches.supervised(step) for batches in mine} == {counted}


def test_epochs_and_seeds_differ(tmp_path: Path, seed: int) -> None:
    file = numbered(tmp_path, 2001)
    orders = [order(GlobalBatches(file, 10, 4, 0).windows, s, epoch) for s in (seed, seed + 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == list(range(200)) for order in orders)


@pytest.mark.parametrize("packed", [False, True])
def test_the_mask_decides_which_targets_count(packed: bool, tmp_path: Path, seed: int) -> None:
    mask = np.random.default_rng(seed).integers(2, size=1100)
    batches = GlobalBatches(numbered(tmp_path, 1100, mask, 11 if packed else None), 10, 5, seed)
    for step in range(batches.steps_per_epoch):
        batch = batches.micro_batch(step, 0, 5)
        following = batch.inputs + 1
        assert torch.equal(batch.targets, torch.where(torch.from_numpy(mask)[following] == 1, following, IGNORED))
        assert batches.supervised(step) == max(1, int(mask[following].sum()))


@pytest.mark.parametrize(
    ("count", "mask", "window", "seed", "says"),
    [
        (40, None, None, 0, "40 tokens: 3 windows of 10, fewer than a batch of 4"),
        (5, None, None, 0, "0 windows"),
        (0, None, None, 0, "0 windows"),
        (100, None, 9, 0, "packed for --sequence-length 8, not 10"),
        (100, np.zeros(100), None, 0, "no token that the loss counts"),
        (100, None, None, -1, "--seed must be from 0 to"),
        (100, None, None, 2**63, "--seed must be from 0 to"),
    ],
)
def test_files_that_make_no_batches(
    count: int, mask: np.ndarray | None, window: int | None, seed: int, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        GlobalBatches(numbered(tmp_path, count, mask, window), 10, 4, seed)


def test_a_damaged_id_is_found_before_it_reaches_the_model(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x.bin", np.arange(9), 9, "none")
    (tmp_path / "x.bin").write_bytes(np.array([0, 1, 2, 3, 4, 5, 6, 7, 9], "<u2").tobytes())
    batches = GlobalBatches(open_tokens(tmp_path / "x.bin", 9), 8, 1, 0)
    with pytest.raises(UserError, match="token id 9, but its header says that all are below 9"):
        batches.micro_batch(0, 0, 1)

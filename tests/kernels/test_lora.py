"""Low-rank products of grouped rows: the reference and the kernels against the definition in fp64."""

import random

import numpy as np
import pytest
import torch

from kernels import lora
from kernels.lora import DECODE_TILE, PREFILL_TILE, Groups, LowRank, add_low_rank, group_rows, most_tiles
from tests.support.kernels import kernels_always
from tests.support.ranks import Ranks


def faults(seed: int, device: str, dtypes: tuple[torch.dtype, ...], large: bool) -> list[str]:
    """What differs from the definition, for random groups of random layers. large: of real sizes, too."""
    random.seed(seed)
    torch.manual_seed(seed)
    found = []
    cases = [(rows, 8, 5, (40, 24, 72), 16) for rows in (1, 3)]
    cases += [(70, 3, 200, (33,), 32), (20, 2, 130, (16, 16, 16, 48, 48), 128), (0, 2, 64, (16,), 16)]
    cases += [(n, 6, 4096, (4096, 1024, 1024), 16) for n in (1, 16, 64)] + [(600, 3, 2048, (7168, 7168), 64)] if large else []
    for (rows, slots, size, sizes, rank), tile in ((case, tile) for case in cases for tile in (DECODE_TILE, PREFILL_TILE)):
        dtype, a_rows = random.choice(dtypes), len(sizes) * rank
        x = torch.randn(2, rows, size).to(dtype)[1]  # contiguous rows of a larger tensor
        y, a = torch.randn(rows, sum(sizes)).to(dtype), (torch.randn(slots, a_rows, size) * size**-0.5).to(dtype)
        b = (torch.randn(slots, sum(sizes), rank) * rank**-0.5).to(dtype)
        chosen = np.random.default_rng(seed).integers(-1, slots, rows)
        padded = rows + random.randrange(4)  # of a step with rows of padding
        order = torch.zeros(padded, dtype=torch.int32)
        tiles = torch.zeros(most_tiles(padded, slots, tile), 3, dtype=torch.int32)
        for whole, part in zip((order, tiles), group_rows(chosen, tile), strict=True):
            whole[: len(part)] = torch.from_numpy(part)
        expected = y.double()
        for row, slot in enumerate(chosen):
            if slot >= 0:
                hidden = (a[slot].double() @ x[row].double()).view(len(sizes), rank)
                parts = b[slot].double().split(sizes)
                expected[row] += torch.cat([part @ low for part, low in zip(parts, hidden, strict=True)])
        weights = LowRank(a.view(slots, len(sizes), rank, size).to(device), b.to(device), sizes)
        groups = Groups(order.to(device), tiles.to(device), tile)
        plain = add_low_rank(
            y.clone(), x, LowRank(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in weights)), Groups(order, tiles, tile)
        )
        with kernels_always(lora):
            out = y.to(device).clone()
            got = add_low_rank(out[None], x.to(device)[None], weights, groups)[0]
        allowed = (
            1e-4
            if dtype == torch.float32
            else 4 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item() if rows else 1)
        )
        for name, result in (("kernel", got.cpu()), ("reference", plain)):
            error = (result.double() - expected).abs().max().item() if rows else 0.0
            if not error <= allowed or (name == "kernel" and rows and got.data_ptr() != out.data_ptr()):
                found.append(
                    f"{name} {rows} {slots} {size} {sizes} {rank} {tile} {dtype}: error {error:.3g}, allowed {allowed:.3g}"
                )
    return found


def test_groups_have_each_row_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        rows, slots, tile = int(rng.integers(0, 40)), int(rng.integers(1, 9)), int(rng.integers(1, 20))
        chosen = rng.integers(-1, slots, rows)
        order, tiles = group_rows(chosen, tile)
        assert len(tiles) <= most_tiles(rows, slots, tile) and all(1 <= count <= tile for _, _, count in tiles)
        placed = [(int(order[first + i]), int(slot)) for slot, first, count in tiles for i in range(count)]
        assert sorted(placed) == [(row, slot) for row, slot in enumerate(chosen) if slot >= 0]


def test_the_kernels_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(faults, seed, "cpu", (torch.float32, torch.float16), False) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_on_a_gpu(seed: int) -> None:
    assert faults(seed, "cuda", (torch.float32, torch.float16, torch.bfloat16), True) == []

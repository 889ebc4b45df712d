"""The vocabulary-parallel embedding: the reference against the whole table, the kernel against the reference."""

import pytest
import torch

from kernels import embedding
from kernels.embedding import embedding_shard, embedding_shard_reference
from tests.support.kernels import kernels_always
from tests.support.ranks import Ranks


def mismatches(seed: int, device: str) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape, rows, size, first in (((1,), 7, 33, 0), ((2, 5), 40, 2048, 40), ((3, 1), 101, 4097, 202), ((0,), 5, 16, 0)):
        weight = torch.randn(rows + 2, size, generator=generator).to(device, torch.bfloat16)[1:-1]
        tokens = torch.randint(max(0, first - rows), first + 2 * rows, shape, generator=generator)
        edges = torch.tensor([first + rows, first + rows - 1, first, max(0, first - 1)])[: tokens.numel()]
        tokens.view(-1)[: len(edges)] = edges
        tokens = tokens.to(device)
        with kernels_always(embedding):
            got = embedding_shard(tokens, weight, first)
        if not torch.equal(got, embedding_shard_reference(tokens, weight, first)):
            found.append(f"{shape} {rows} {size} {first}")
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_add_up_to_the_table(ranks: int, seed: int) -> None:
    weight = torch.randn(8 * ranks, 12)
    tokens = torch.randint(0, 8 * ranks, (2, 6))
    parts = [embedding_shard(tokens, weight[8 * r : 8 * (r + 1)], 8 * r) for r in range(ranks)]
    assert torch.equal(torch.stack(parts).sum(0), weight[tokens])


def test_the_kernel_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(mismatches, seed, "cpu") == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_a_gpu(seed: int) -> None:
    assert mismatches(seed, "cuda") == []

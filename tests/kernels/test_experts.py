"""Sparse MLPs: the router's choice, the tiles, and the kernels against the definition in fp64."""

import random

import pytest
import torch
from torch import Tensor

from kernels.experts import _choose, _choose_many, most_tiles, route, sparse_mlp
from tests.support.gpus import needs_gpu
from tests.support.ranks import Ranks


def definition(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, biases: tuple[Tensor, Tensor], limit: float
) -> Tensor:
    """Of a token, the sum over its experts; all in fp64. With a limit, the activation is gpt-oss's."""
    size, inner = x.shape[1], down.shape[1]
    matrices, outs = gate_up.double().view(-1, 2, inner, size), down.double().view(-1, size, inner)
    above, below = biases[0].double().view(-1, 2, inner), biases[1].double().view(-1, size)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        for e, weight in zip(experts[t].tolist(), weights[t].double(), strict=True):
            gate, up = matrices[e] @ row + above[e]
            hidden = torch.nn.functional.silu(gate) * up
            if limit:
                gate, up = gate.minimum(torch.tensor(limit)), up.maximum(torch.tensor(-limit)).minimum(torch.tensor(limit))
                hidden = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
            out[t] += weight * (outs[e] @ hidden + below[e])
    return out


def faults(seed: int, device: str, dtype: torch.dtype, cases: list[tuple[int, ...]], limit: float = 0.0) -> list[str]:
    """With a limit, there are biases, too. Cases (tokens, experts, chosen, hidden size, width of an expert) in which the kernels differ from the definition."""
    torch.manual_seed(seed)
    random.seed(seed)
    found = []
    for tokens, count, chosen, size, inner in cases:
        x, router = torch.randn(tokens, size), torch.randn(count, size) * 2 * size**-0.5
        shared = torch.randn(size)
        if random.random() < 0.5:  # many tokens have the same experts, and some experts have none
            x += shared
            router[: count // 2] += shared / shared.norm() * random.choice([-1, 1])
        gate_up, down = torch.randn(count * 2 * inner, size) * size**-0.5, torch.randn(count * size, inner) * inner**-0.5
        biases = tuple(torch.randn(rows) * (limit > 0) for rows in (count, count * 2 * inner, count * size))
        x, router, gate_up, down, *biases = (t.to(dtype) for t in (x, router, gate_up, down, *biases))
        normalized = random.random() < 0.5
        logits = x.double() @ router.double().t() + biases[0].double()
        order = logits.sort(-1, descending=True).values
        clear = torch.ones(tokens, dtype=torch.bool) if chosen == count else order[:, chosen - 1] - order[:, chosen] > 1e-4
        experts, weights = route(logits, chosen, normalized)
        expected = definition(x, gate_up, down, experts, weights, (biases[1], biases[2]), limit)
        given = tuple(b.to(device) if limit else None for b in biases)
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        for _ in range(2):
            got = sparse_mlp(*(t.to(device) for t in (x, router, gate_up, down)), chosen, normalized, counter, given, limit)
            got = got.cpu().double()
            error = ((got - expected).norm(dim=1) / expected.norm(dim=1))[clear].max().item()
            allowed = 1e-4 if dtype == torch.float32 else 2e-2  # logits up to 45 have errors of 1e-5, and so have the weights
            if not error < allowed:
                found.append(f"{tokens, count, chosen, size, inner} in {dtype}: {error:.2e}")
    return found


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_kernels_in_the_interpreter(limit: float, interpreters: Ranks, seed: int) -> None:
    cases = [(1, 4, 2, 40, 24), (3, 5, 5, 72, 33), (17, 3, 1, 33, 40), (20, 20, 3, 20, 9)]
    assert interpreters.call(faults, seed, "cpu", torch.float32, cases, limit) == []


@needs_gpu
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu(dtype: torch.dtype, limit: float, seed: int) -> None:
    cases = [(n, 16, 4, 256, 192) for n in (1, 2, 16, 127, 128, 129, 1000)]
    cases += [(5, 7, 7, 80, 48), (300, 2, 1, 264, 136), (1, 128, 8, 2048, 768), (33, 8, 2, 512, 1792)]
    assert faults(seed, "cuda", dtype, cases, limit) == []


def test_the_router_s_choice(seed: int) -> None:
    """The largest logits with their softmax over all experts; of equal ones the first, in each row of a batch."""
    tokens, count = random.randint(1, 9), random.choice([4, 60, 128])
    chosen = random.randint(1, count)
    logits = torch.randn(tokens, count) * 3
    experts, weights = route(logits, chosen, False)
    expected = logits.double().softmax(-1).topk(chosen)
    assert torch.equal(experts, expected.indices)
    torch.testing.assert_close(weights.double(), expected.values, atol=1e-6, rtol=1e-5)
    normalized = route(logits, chosen, True)[1]
    torch.testing.assert_close(
        normalized.double(), expected.values / expected.values.sum(-1, keepdim=True), atol=1e-6, rtol=1e-5
    )
    equal = torch.randint(0, 2, (tokens, count)).float()
    ordered = [sorted(range(count), key=lambda e: (-row[e], e))[:chosen] for row in equal.tolist()]
    assert route(equal, chosen, False)[0].tolist() == ordered


def wrong_routes(seed: int, device: str, cases: int) -> list[str]:
    """Random choices whose experts, weights or tiles are wrong, or not the same from both ways of choosing."""
    torch.manual_seed(seed)
    random.seed(seed)
    found, counter = [], torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(cases):
        tokens, count, tile = random.randint(1, 40), random.randint(1, 20), random.choice([1, 4, 16])
        chosen, normalized = random.randint(1, count), random.random() < 0.5
        x, router = torch.randint(-2, 3, (tokens, 8)).float(), torch.randint(-1, 2, (count, 8)).float()  # with equal logits
        expected = route(x @ router.t(), chosen, normalized)
        for choose in (_choose, _choose_many):
            routes = choose(x.to(device), router.to(device), chosen, normalized, tile, counter)
            experts, weights, slots, owners, starts = (t.cpu() for t in routes)
            wrong = not torch.equal(experts.long(), expected[0]) or (weights - expected[1]).abs().max().item() > 1e-6
            seen = []
            for start in starts[starts < tokens * chosen].tolist():
                there = [p for p in range(start, min(start + tile, len(slots))) if owners[p] == owners[start]]
                wrong |= any(experts.flatten()[slots[p]] != owners[p] for p in there)
                seen += slots[there].tolist()
            if wrong or sorted(seen) != list(range(tokens * chosen)) or len(starts) != most_tiles(len(slots), count, tile):
                found.append(f"{choose.__name__}: {tokens} tokens, {chosen} of {count}, tiles of {tile}")
    return found


def test_every_slot_is_in_one_tile_of_its_expert(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(wrong_routes, seed, "cpu", 5) == []


@needs_gpu
def test_every_slot_is_in_one_tile_of_its_expert_on_a_gpu(seed: int) -> None:
    assert wrong_routes(seed, "cuda", 100) == []

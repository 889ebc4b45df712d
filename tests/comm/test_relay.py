"""Two-step all-reduces through host memory: the protocol on CPU ranks that share memory, and on GPUs without peer access."""

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.quantize import parse_scheme
from comm.quantized import quantized_all_reduce
from comm.relay import ALIGNMENT, CHUNKS, Relay, RelayCommunicator
from errors import UserError
from tests.support.gpus import most_ranks, torchrun
from tests.support.ranks import Ranks
from tp import World

CPU = torch.device("cpu")
TOKEN = 96  # values of a token


def distinct_results(x: Tensor) -> set[bytes]:
    by_rank: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(by_rank, x.contiguous().view(torch.uint8).numpy().tobytes())
    return set(by_rank)


def wrong_sums(world: World, name: str | None, sizes: list[int], capacity: int, seed: int) -> list[str]:
    """Messages whose all-reduce is wrong. Ranks start after random delays. All have several chunks, long ones several pieces."""
    import comm.relay

    comm.relay.MIN_CHUNK, comm.relay.MAX_CHUNK = 64, 3000
    scheme, draw = None if name is None else parse_scheme(name), random.Random(seed + world.rank)
    ours, generator, found = RelayCommunicator(scheme, CPU, capacity=capacity), torch.Generator().manual_seed(seed), []
    for size in sizes:
        dtype = (torch.float32, torch.bfloat16, torch.float16)[size % 3]
        shape = (size // TOKEN + 1, TOKEN) if name and "token" in name else (size,)
        by_rank = torch.randn(world.world_size, *shape, generator=generator).to(dtype)
        time.sleep(draw.random() * 0.02)
        total = ours.all_reduce(by_rank[world.rank].clone())
        if scheme is None:
            expected = by_rank[0].float()
            for part in by_rank[1:]:
                expected = expected + part
            same = torch.equal(total, expected.to(dtype))
        else:
            same = torch.equal(total, quantized_all_reduce(by_rank[world.rank], scheme, None))
        if not same or total.dtype != dtype or len(distinct_results(total)) != 1:
            found.append(f"{size} {dtype}")
    ours.check()
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_same_bits_as_the_definition(ranks: Ranks, n: int, in_turn: Callable[..., str | None], seed: int) -> None:
    name = in_turn([None, "int8", "int6:64", "int4:token:hadamard"], n)
    sizes = [1, 64, 1000, 30000, *(random.randrange(2, 30000) for _ in range(8))]
    capacity = CHUNKS * ALIGNMENT + random.choice([1 << 13, 1 << 15])
    assert ranks.run(n, wrong_sums, name, sizes, capacity, seed) == [[]] * n, f"seed {seed}"


def wrong_with_short_messages(world: World, seed: int) -> list[str]:
    from tests.comm.test_symmetric import SHORT, symmetric

    one_shot = symmetric("one-shot", "host")
    scheme, generator, found = parse_scheme("int4"), torch.Generator().manual_seed(seed), []
    ours = RelayCommunicator(scheme, CPU, capacity=1 << 18, one_shot=one_shot)
    for size, overlap in [(1000, False), (1 << 15, True), (128, True), (1 << 15, False), (7, False)]:
        by_rank = torch.randn(world.world_size, size, generator=generator)
        mine = by_rank[world.rank]
        total = ours.begin_all_reduce(mine.clone(), overlap).wait()
        exact = by_rank.sum(0)
        near = bool(((total - exact).abs() <= 1e-5).all())
        if near != (4 * size <= SHORT) or not (near or torch.equal(total, quantized_all_reduce(mine, scheme, None))):
            found.append(f"{size} {overlap=}")
    gathered = ours.all_gather(torch.full((2, 3), float(world.rank)))
    if gathered.shape != (2, 3 * world.world_size) or gathered[1, -1] != world.world_size - 1:
        found.append("gather")
    ours.check()
    return found


def test_short_messages_are_summed_as_they_are(interpreters: Ranks, seed: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install triton")
    assert interpreters.run(2, wrong_with_short_messages, seed) == [[]] * 2, f"seed {seed}"


def empty(world: World) -> list[int]:
    return list(RelayCommunicator(None, CPU, capacity=1 << 14).all_reduce(torch.zeros(0, 5)).shape)


def test_an_empty_sum_is_empty(ranks: Ranks) -> None:
    assert ranks.run(2, empty) == [[0, 5], [0, 5]]


def lone_wait(world: World) -> str:
    """The error of rank 0, which times out because rank 1 does not take part."""
    import comm.relay

    comm.relay.TIMEOUT = 0.1
    ours = RelayCommunicator(None, CPU, capacity=1 << 14)
    if world.rank == 1:
        return ""
    ours.all_reduce(torch.ones(100))
    try:
        ours.check()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_times_out_says_so(ranks: Ranks) -> None:
    assert "rank 0 timed out" in ranks.run(2, lone_wait)[0]


def full(world: World) -> str:
    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    os.posix_fallocate, before = no_room, os.posix_fallocate
    try:
        Relay(CPU, 1 << 20)
    except UserError as error:
        return str(error)
    finally:
        os.posix_fallocate = before
    return "no error"


def test_too_little_memory_to_share_is_one_error_on_every_rank(ranks: Ranks) -> None:
    for said in ranks.run(2, full):
        assert "No space left" in said and "--shm-size" in said and "--comm nccl" in said


# --- GPUs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(most_ranks() < 2, reason="needs two GPUs")
def test_on_gpus_that_may_not_reach_each_other(tmp_path: Path) -> None:
    """All-reduces of all sizes are right, also after thousands of graph replays. Quantized ones have the same bits as the
    two-step all-reduce over NCCL."""
    count, out = min(8, most_ranks()), tmp_path / "comm.json"
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}
    torchrun(count, "-m", "tests.comm.gpu_all_reduce_rank", str(out), ".", timeout=600, env=environment)
    report = json.loads(out.read_text())
    assert report["errors"] == {} and not report["p2p"]
    assert {"correct bf16", "correct norms", "correct quantized", "replays", "replays quantized"} <= report["found"].keys()


def test_shared_memory_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """So nothing of it is left when its processes are killed, whenever that is."""
    from comm.workspace import _shared_file

    monkeypatch.setattr("os.access", lambda *_: False)  # /dev/shm
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as opened:
        name, inode, problem = _shared_file(1 << 14, opened)
        assert (problem, os.listdir(tmp_path), os.stat(name).st_ino) == ("", [], inode)
        with open(name, "r+b") as one, open(name, "rb") as other:
            one.write(data := random.randbytes(1 << 14))
            one.flush()
            assert other.read() == data
    assert not os.path.exists(name)

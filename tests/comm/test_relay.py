"""Two-step all-reduces through host memory: the protocol on CPU ranks that share memory, and on GPUs without peer access."""

import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from comms.quantize import parse_scheme
from comms.quantized import quantized_all_reduce
from comms.relay import Relay, RelayCommunicator
from errors import UserError
from tests.support.gpus import gpu_report, needs_two
from tests.support.ranks import Ranks
from tests.support.sums import CPU, SHORT, symmetric
from tp import World


def wrong_with_short_messages(world: World, seed: int) -> list[str]:
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


@needs_two
def test_on_gpus_that_may_not_reach_each_other(tmp_path: Path) -> None:
    """All-reduces of all sizes are right, also after thousands of graph replays. Quantized ones have the same bits as the
    two-step all-reduce over NCCL."""
    apart = {"NCCL_P2P_DISABLE": "1"}
    report = gpu_report("tests.comm.gpu_all_reduce_rank", tmp_path, ".", most=8, timeout=600, env=apart)
    assert not report["p2p"]
    assert {"correct bf16", "correct norms", "correct quantized", "replays", "replays quantized"} <= report["found"].keys()


def test_shared_memory_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """So nothing of it is left when its processes are killed, whenever that is."""
    from comms.workspace import _shared_file

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

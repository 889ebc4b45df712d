"""Hierarchical all-reduces: 4 gloo ranks as 2 hosts of 2, against the sum in fp64; and the choice by size."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comms import GlooCommunicator, HierarchicalCommunicator, fastest_between_hosts
from comms.hierarchical import HOST_ID, BySize, host_of_each_rank
from comms.process_group import SHARE_GPUS
from comms.registry import choose
from errors import UserError
from tests.support.ranks import Ranks
from tp import World

CPU = torch.device("cpu")


@contextmanager
def on_hosts(world: World, hosts: list[str]) -> Iterator[None]:
    """This rank is one of the host hosts[rank]."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_HOSTID", hosts[world.rank])
        yield


def summed(world: World, hosts: list[str], partials: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """All-reduces of this rank's partials (row r of each), all begun before the first wait, and a gathered row of the rank."""
    with on_hosts(world, hosts):
        communicator = HierarchicalCommunicator(CPU)
        pending = [communicator.begin_all_reduce(p[world.rank].clone(), overlap=True) for p in partials]
        gathered = communicator.all_gather(torch.full((2, 1), float(world.rank)))  # while they are in flight
        assert communicator.waited is not None
        return [each.wait() for each in pending], gathered


def flat_sum(world: World, parts: Tensor) -> Tensor:
    return GlooCommunicator().all_reduce(parts[world.rank].clone())


def test_bf16_is_summed_in_fp32_and_rounded_once(ranks: Ranks, seed: int) -> None:
    """Sums of integers of 8 bits are exact in fp32, and take up to 10 bits."""
    parts = torch.randint(-255, 256, (4, 5000)).bfloat16()
    for [total], _ in ranks.run(4, summed, list("aabb"), [parts]):
        assert torch.equal(total, parts.float().sum(0).bfloat16())
    for total in ranks.run(4, flat_sum, parts):
        assert torch.equal(total, parts.float().sum(0).bfloat16())


def crossing(world: World, hosts: list[str], size: int) -> list[tuple[int, list[str]]]:
    """For each sum between hosts in an all-reduce of `size` numbers: how many are summed, and the hosts of the ranks that sum them."""
    found, summed_by_torch = list[tuple[int, list[str]]](), dist.all_reduce

    def noted(shard: Tensor, group: dist.ProcessGroup) -> None:
        found.append((shard.numel(), sorted(hosts[rank] for rank in dist.get_process_group_ranks(group))))
        summed_by_torch(shard, group=group)

    with on_hosts(world, hosts), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        HierarchicalCommunicator(CPU).all_reduce(torch.ones(size))
    return found


def test_each_rank_sends_its_share_of_a_message_to_other_hosts(ranks: Ranks) -> None:
    assert ranks.run(4, crossing, list("abab"), 1001) == [[(501, ["a", "b"])]] * 4


def named(world: World) -> list[tuple[str, str]]:
    """The hosts of ranks that share GPUs, for which NCCL_HOSTID always differs: each pair of ranks names one."""
    os.environ |= {SHARE_GPUS: "1", "NCCL_HOSTID": f"rank-{world.rank}"}
    try:
        before = host_of_each_rank()
        os.environ[HOST_ID] = f"host-{world.rank // 2}"
        return [before[0], *host_of_each_rank()] if len(set(before)) == 1 else []
    finally:
        for name in (SHARE_GPUS, "NCCL_HOSTID", HOST_ID):
            os.environ.pop(name, None)


def test_a_host_has_the_name_that_it_is_given(ranks: Ranks) -> None:
    for own, *found in ranks.run(4, named):
        assert [name for name, _ in found] == ["host-0", "host-0", "host-1", "host-1"] and own not in found


def built(world: World, hosts: list[str], name: str) -> tuple[str, str]:
    """The built communicator's type, or its error."""
    try:
        with on_hosts(world, hosts):
            communicator = choose("cpu", name).build()
        assert torch.equal(communicator.all_reduce(torch.ones(3)), torch.full((3,), 4.0))
        return type(communicator).__name__, ""
    except UserError as e:
        return "", str(e)


@pytest.mark.parametrize("hosts", ["aabb", "aaaa", "abcd", "aaab"])
def test_it_is_offered_between_hosts_with_equally_many_ranks_only(hosts: str, ranks: Ranks) -> None:
    offered = hosts == "aabb"
    assert ranks.run(4, built, list(hosts), "auto") == [("BySize" if offered else "GlooCommunicator", "")] * 4
    for kind, error in ranks.run(4, built, list(hosts), "hierarchical"):
        assert kind == ("HierarchicalCommunicator" if offered else "")
        assert offered or ("several hosts with the same number of ranks" in error and "use --comm gloo" in error)


def choices(world: World, hosts: list[str]) -> tuple[list[bool], dict[int, bool], bool]:
    with on_hosts(world, hosts):
        measured = fastest_between_hosts(GlooCommunicator(), CPU)
        assert isinstance(measured, BySize)
        flat, hierarchical = GlooCommunicator(), HierarchicalCommunicator(CPU)
        by_size = BySize(flat, hierarchical, {1 << 12: False, 1 << 20: True})
        chosen = [by_size.choose(size) is hierarchical for size in (0, 4, 1 << 15, 1 << 17, 1 << 30)]
        total = by_size.all_reduce(torch.ones(1 << 18))
        return chosen, measured._faster, total.min() == total.max() == 4 and bool(by_size.waited)


def test_the_choice_is_by_size_and_the_same_on_all_ranks(ranks: Ranks) -> None:
    results = ranks.run(4, choices, list("aabb"))
    assert all(result == results[0] for result in results)
    assert results[0][0] == [False, False, False, True, True] and results[0][2] and results[0][1]

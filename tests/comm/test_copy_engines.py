"""All-reduces by copy engines: the protocol on CPU ranks that share memory, with its kernels in the interpreter, and on GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.gpus import most_ranks, needs_two, torchrun
from tests.support.ranks import Ranks
from tests.support.sums import CPU, STEPS, close, partials
from tp import World

CAPACITY = 4 << 10


def sent_by_copies(world: World, seed: int) -> list[tuple[str, bool, int]]:
    """Of messages of a two-shot communicator with each schedule, whether overlapped or not: those that copies sent."""
    import comms.symmetric as module
    from comms.interface import SCHEDULES
    from comms.symmetric import CopyEngines

    sent: list[tuple[str, bool, int]] = []

    class Recording(CopyEngines):
        def all_reduce(self, partial: Tensor) -> Tensor:
            sent.append((comm.schedule, overlap, partial.nbytes))
            return super().all_reduce(partial)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_COPIED", 1000)
        patch.setattr(module, "CopyEngines", lambda *arguments: Recording(*arguments, CAPACITY))
        for name in ("CAPACITY", "OVERLAP_CAPACITY", "FEW_SMS_CAPACITY"):
            patch.setattr(module, name, dict.fromkeys(module.KINDS, 4096))
        comm, generator = module.SymmetricCommunicator("two-shot", CPU), torch.Generator().manual_seed(seed)
        for schedule in SCHEDULES:
            comm.use(schedule)
            for size, overlap in ((499, True), (500, True), (500, False)):
                partial, exact = partials(world, generator, size, dtype=torch.float16)
                assert close(comm.begin_all_reduce(partial, overlap).wait(), exact, STEPS[torch.float16])
        comm.check()
    return sent


def test_long_overlapped_messages_are_copied(interpreters: Ranks, seed: int) -> None:
    assert interpreters.run(2, sent_by_copies, seed) == [[("copy-engines", True, 1000)]] * 2


def unanswered(world: World) -> Any:
    """What a rank says whose flags nobody sets."""
    from comms.interface import check_faults
    from comms.symmetric import SUM, CopyEngines

    engines = CopyEngines(CPU, CAPACITY)
    if world.rank == 0:
        import kernels.relay as kernels

        engines.epoch.add_(1)
        others = engines.shared.addresses[0] + engines._flag_offset(SUM, 1)
        kernels.wait_flags((others,), engines.epoch, engines.fault, max_polls=3)
        with pytest.raises(RuntimeError, match="rank 0 timed out"):
            check_faults()
    else:
        check_faults()
    return True


def test_a_rank_that_does_not_answer(interpreters: Ranks) -> None:
    assert interpreters.run(2, unanswered) == [True, True]


@needs_two
def test_on_gpus(tmp_path: Path) -> None:
    """Replays of a graph of all-reduces beside GEMMs give the bits of a sum in rank order, by copies between GPUs."""
    torchrun(min(most_ranks(), 4), "-m", "tests.comm.gpu_copies_rank", str(tmp_path / "rank"), timeout=240)
    for path in tmp_path.iterdir():
        for case in map(json.loads, path.read_text().splitlines()):
            assert case["wrong"] == 0 and case["copies"] >= case["needed"], case

"""All-reduces over shared memory: the kernels in Triton's interpreter on gloo ranks that poll shared memory, and on GPUs."""

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kernels.norm import add_rms_norm
from tests.comm.test_every_sum import differences_of_codes
from tests.support.gpus import gpu_report, needs_two
from tests.support.ranks import RankError, Ranks
from tests.support.sums import CPU, SHORT, close, partials, same_bits, symmetric
from tp import World

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

KINDS = ("one-shot", "two-shot")


def not_trees(world: World, kind: Any, seed: int) -> list[str]:
    """With --deterministic: sums, and norms after an addition, whose bits are not those of the definition. The interpreter does not
    round to bf16."""
    from kernels import determinism

    torch.manual_seed(seed)
    found, draw = [], random.Random(seed)
    determinism.enable()
    try:
        comm = symmetric(kind)
        for n, dtype in itertools.product((1, 33 * 8, draw.randrange(1000, 3000) * 8, SHORT), (torch.float32, torch.float16)):
            both = (torch.randn(2, n) * torch.exp2(torch.randint(-9, 9, (2, n)).float())).to(dtype)
            both[:, 0] = -0.0
            x, weight = torch.randn(n // 8, 8).to(dtype), torch.randn(8).to(dtype)
            expected = (both[0].double() + both[1].double()).to(dtype)  # fp64 hardly ever rounds
            comm.use(draw.choice(["overlapped", "few-sms"]))
            pending = comm.begin_all_reduce(both[world.rank].clone(), overlap=draw.random() < 0.5)
            if not same_bits(pending.wait(), expected):
                found.append(f"{n} {dtype}")
            if n % 8 == 0:
                pending = comm.begin_all_reduce(both[world.rank].clone().view(-1, 8))
                expected_norm = add_rms_norm(x, expected.view(-1, 8), weight, 1e-5)
                if not all(map(same_bits, pending.add_norm(x, weight, 1e-5), expected_norm)):
                    found.append(f"norm of {n} {dtype}")
        comm.check()
    finally:
        determinism.enable(False)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_add_the_tree_of_the_deterministic_mode(interpreters: Ranks, kind: str, seed: int) -> None:
    assert interpreters.run(2, not_trees, kind, seed) == [[], []], f"seed {seed}"


def sums_of_long_messages(world: World, kind: Any, seed: int) -> bool:
    comm = symmetric(kind)
    assert comm.fallback.name == "gloo"
    for kernel in (comm.blocking, comm.overlapped):
        kernel.workspace.exchange = replace(kernel.workspace.exchange, capacity=1024)
    generator = torch.Generator().manual_seed(seed)
    partial, exact = partials(world, generator, 1717, dtype=torch.float32)
    blocking = comm.all_reduce(partial.clone())  # it may overwrite its argument
    overlapped = comm.begin_all_reduce(partial, overlap=True).wait()
    return close(blocking, exact, 4) and close(overlapped, exact, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_larger_than_the_workspace(interpreters: Ranks, kind: str, seed: int) -> None:
    assert interpreters.run(2, sums_of_long_messages, kind, seed) == [True, True], f"seed {seed}"


# --- epochs ------------------------------------------------------------------------------------------------------------------


def sums_around(world: World, epoch: int, memory: Any, seed: int) -> list[str]:
    """Messages whose all-reduce is wrong while the launch counters pass `epoch`. The buffers hold old words with the flags of
    later launches."""
    from comms.workspace import open_workspace
    from kernels.all_reduce import one_shot, one_shot_bytes

    workspace = open_workspace(one_shot_bytes, 4096, CPU, memory=memory)
    exchange = workspace.exchange
    generator, found = torch.Generator().manual_seed(seed), []
    # 2^31 launches earlier, a longer message left words with the flags of the launches after the zeroing
    before = epoch - 2**31
    if before >= 0:
        for stale in (before + 1, before + 2):  # leave such words in each slot
            exchange.epochs.fill_(stale - 1)
            one_shot(torch.full((1000,), 1e6), exchange)
    exchange.epochs.fill_(epoch - 3)
    for n in (10, 20, 10, 900, 900, 7):
        partial, exact = partials(world, generator, n, dtype=torch.float32)
        if not close(one_shot(partial, exchange), exact, 4):
            found.append(f"{n} values at {int(exchange.epochs[0])}")
    if set(exchange.epochs.tolist()) != {epoch + 3}:
        found.append(f"counters {set(exchange.epochs.tolist())}")
    dist.barrier()  # the other rank has sent everything
    for name, words in receive_buffers(exchange).items():
        values = words.view(torch.float32)[::2]
        if bool((values == 1e6).any()):
            found.append(f"old words in the {name}")
    return found


def receive_buffers(exchange: Any) -> dict[str, Tensor]:
    """The memory that receives words for this rank, as int64: its own buffer and, if it has one, its host buffer."""
    from kernels.all_reduce import one_shot_bytes

    size = one_shot_bytes(exchange.world_size, exchange.capacity) // 8
    addresses = {"buffer": exchange.peers[-1]} | ({} if exchange.host_buffer is None else {"host": exchange.host_buffer})
    return {
        name: torch.frombuffer((ctypes.c_int64 * size).from_address(address), dtype=torch.int64)
        for name, address in addresses.items()
    }


def flags(words: Tensor) -> set[int]:
    """The upper halves of the words, unsigned."""
    return {flag & 0xFFFFFFFF for flag in (words >> 32).unique().tolist()}


def flag_of(launch: int) -> int:
    return launch & 0x7FFFFFFF | 0x80000000


EPOCHS = [2**30, 2**31, 2**32, 5 * 2**31]


@pytest.mark.parametrize("epoch", EPOCHS, ids=["2^30", "2^31", "2^32", "5*2^31"])
def test_flags_wrap_around(interpreters: Ranks, epoch: int, in_turn: Callable[..., str], seed: int) -> None:
    memory = in_turn(["peer", "host"], EPOCHS.index(epoch))
    assert interpreters.run(2, sums_around, epoch, memory, seed) == [[], []], f"seed {seed}"


def wrong_gathers_with_a_late_program(world: World, memory: Any, blocks: int, first: int, seed: int) -> list[str]:
    """Gathers with a wrong result, of six launches from number `first` on, for workspaces of several sizes.

    Rank 0's last program sends to rank 0 itself, so no other rank waits for it. It begins only when the last rank has sent its
    first block of the next launch to rank 0. It must not zero that block. But words of much earlier launches must be gone in
    the end."""
    from triton.runtime import interpreter

    from comms.workspace import open_workspace
    from kernels.all_reduce import Tiling, one_shot_bytes, one_shot_gather

    block, launches, builder = 64, range(first, first + 6), interpreter.interpreter_builder
    generator, found = torch.Generator().manual_seed(seed), []
    late: list[Any] = []  # (launch, its exchange) whose last program is late

    def begin(x: int, y: int, z: int) -> None:
        if late and x == builder.grid_dim[0] - 1:
            await_first_block(*late.pop())
        type(builder).set_grid_idx(builder, x, y, z)

    def await_first_block(launch: int, exchange: Any) -> None:
        slot, source = (launch + 1) & 1, world.world_size - 1
        *_, words = receive_buffers(exchange).values()
        arrived = words.view(2, world.world_size, -1)[slot, source, :1]
        deadline = time.monotonic() + 100.0
        while flags(arrived) != {flag_of(launch + 1)}:
            assert time.monotonic() < deadline, f"nothing of launch {launch + 1} has come"
            time.sleep(1e-3)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(builder, "set_grid_idx", begin, raising=False)
        for capacity in range(blocks, blocks + 2 * world.world_size):  # in blocks
            workspace = open_workspace(one_shot_bytes, 4 * block * capacity, CPU, memory=memory)
            # rank 0 gives up, and fails, long before the other ranks do
            exchange = replace(workspace.exchange, max_polls=100_000) if world.rank == 0 else workspace.exchange
            exchange.epochs.fill_(first - 1)
            for words in receive_buffers(exchange).values() if first > 1 else ():
                words.fill_((flag_of(first - 1000) - 2**32) << 32)
            dist.barrier()
            for launch in launches:
                shards = torch.randint(-100, 100, (world.world_size, block * blocks), dtype=torch.int32, generator=generator)
                if world.rank == 0 and launch != launches[-1]:
                    late.append((launch, exchange))
                gathered = one_shot_gather(shards[world.rank], exchange, Tiling(block, 4))
                assert not int(exchange.fault), f"a word of launch {launch} was lost, in a workspace of {capacity} blocks"
                if not torch.equal(gathered, shards.flatten()):
                    found.append(f"launch {launch}, {capacity} blocks")
            dist.barrier()
            for name, words in receive_buffers(exchange).items():
                if flags(words) - {0} - {flag_of(launch) for launch in launches}:
                    found.append(f"old words in the {name} of {capacity} blocks")
    return found


@pytest.mark.parametrize(("place", "first"), list(enumerate([1, 2**30 - 3, 2**31 - 3])), ids=["1", "2^30", "2^31"])
def test_no_late_program_of_a_gather_zeroes_words_of_the_next(
    interpreters: Ranks, place: int, first: int, in_turn: Callable[..., tuple[int, int, str]], seed: int
) -> None:
    n, blocks, memory = in_turn([(3, 1, "peer"), (3, 1, "host"), (2, 3, "peer")], place)
    found = interpreters.run(n, wrong_gathers_with_a_late_program, memory, blocks, first, seed)
    assert found == [[]] * n, f"seed {seed}"


# --- programs that run at the same time --------------------------------------------------------------------------------------


def run_programs_in_threads() -> None:
    """Make the interpreter run a launch's programs concurrently, each in a thread, instead of one after the other."""
    from triton.runtime import interpreter

    here = threading.local()
    builder = interpreter.interpreter_builder
    builder.__class__ = type(
        "ThreadedBuilder",
        (type(builder),),
        {"grid_idx": property(lambda self: here.index, lambda self, index: setattr(here, "index", index))},
    )

    def launch(self: Any, *args: Any, **more: Any) -> None:
        more = {name: value for name, value in more.items() if name in self.arg_names}
        bound = interpreter.inspect.getcallargs(self.fn, *args, **more)
        bound = {n: v if n in self.constexprs else interpreter._implicit_cvt(v) for n, v in bound.items()}
        patch = interpreter._patch_lang(self.fn)
        programs = self.grid[0]
        builder.set_grid_dim(programs, 1, 1)
        failures: list[BaseException] = []

        def program(index: int) -> None:
            try:
                builder.set_grid_idx(index, 0, 0)
                self.fn(**bound)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=program, args=(index,)) for index in range(programs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        patch.restore()
        if failures:
            raise failures[0]

    interpreter.GridExecutor.__call__ = launch


def wrong_split_rows(world: World, seed: int) -> list[str]:
    """Cases with a wrong result. Several programs share a row and exchange their sums of squares and largest values."""
    from comms.workspace import open_workspace
    from kernels.all_reduce import Tiling, one_shot_add_norm, one_shot_bytes
    from tests.support.kernels import codes_as_on_a_gpu

    run_programs_in_threads()
    workspace = open_workspace(one_shot_bytes, 8192, CPU)
    exchange = workspace.exchange
    generator, found = torch.Generator().manual_seed(seed), []
    for rows, width, block in ((1, 200, 64), (3, 256, 64), (2, 90, 32), (1, 200, 128)):
        partial, exact = partials(world, generator, rows, width, dtype=torch.float32)
        x, weight = torch.randn(rows, width, generator=generator), torch.randn(width, generator=generator)
        total, normed = one_shot_add_norm(partial, x, weight, 1e-5, exchange, Tiling(block, 4))
        expected = F.rms_norm(total.double(), (width,), weight.double(), 1e-5)
        if not close(total, x.double() + exact, 8) or not close(normed, expected, 8):
            found.append(f"{rows} {width} {block}")
    for rows, width, block in ((3, 256, 32), (2, 208, 64), (2, 96, 64)):
        partial, _ = partials(world, generator, rows, width, dtype=torch.float16)
        x, weight = torch.randn(rows, width, generator=generator).half(), torch.randn(width, generator=generator).half()
        _, normed = one_shot_add_norm(partial, x, weight, 1e-5, exchange, Tiling(block, 4))
        with codes_as_on_a_gpu():
            _, codes = one_shot_add_norm(partial, x, weight, 1e-5, exchange, Tiling(block, 4), codes=True)
        found += [f"codes {rows} {width} {block}: {what}" for what in differences_of_codes(codes, normed)]
    return found + (["fault"] if int(exchange.fault) else [])


def test_programs_that_share_a_row(interpreters: Ranks, seed: int) -> None:
    try:
        assert interpreters.run(2, wrong_split_rows, seed) == [[], []], f"seed {seed}"
    finally:
        interpreters.end()  # their interpreter has been patched


# --- what does not fit -------------------------------------------------------------------------------------------------------


def refusals(world: World) -> list[str]:
    from comms.workspace import open_workspace
    from kernels.all_reduce import Tiling, one_shot, one_shot_add_norm, one_shot_bytes, two_shot, two_shot_bytes

    said = []
    workspace = open_workspace(one_shot_bytes, 4096, CPU)
    exchange = workspace.exchange
    other = open_workspace(two_shot_bytes, 1024, CPU)
    x = torch.ones(2, 30)
    for call in (
        lambda: one_shot(torch.ones(1025), exchange),
        lambda: one_shot(torch.ones(513), exchange, Tiling(1, 1)),
        lambda: two_shot(torch.ones(257), other.exchange),
        lambda: one_shot_add_norm(x, x.half(), torch.ones(30), 1e-5, exchange),
        lambda: one_shot_add_norm(x.bfloat16()[:, :29], x.bfloat16()[:, :29], x[0, :29].bfloat16(), 1e-5, exchange),
    ):
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_is_refused(interpreters: Ranks) -> None:
    for large, many, slices, dtypes, odd in interpreters.run(2, refusals):
        assert "4100 bytes" in large and "4096" in large
        assert "513 programs" in many and "512" in many
        assert "1028 bytes" in slices
        assert "float16" in dtypes and "no kernel" in dtypes
        assert "(2, 29)" in odd


def dies_before_the_workspace(world: World) -> None:
    from comms.workspace import open_workspace

    if world.rank == 1:
        raise ValueError("gone")
    open_workspace(lambda n, capacity: capacity, 1024, CPU)


def test_opening_a_workspace_fails_if_a_rank_has_died(interpreters: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ranks.GRACE", 0.5)  # rank 0 may wait for rank 1 all this time
    with pytest.raises(RankError, match="gone"):
        interpreters.run(2, dies_before_the_workspace, timeout=100.0)


# --- GPUs --------------------------------------------------------------------------------------------------------------------


@needs_two
def test_on_gpus(tmp_path: Path) -> None:
    """All-reduces of all sizes and dtypes are right, also after thousands of graph replays."""
    report = gpu_report("tests.comm.gpu_all_reduce_rank", tmp_path, "^(?!.*quantized)", most=8, timeout=600)
    assert {"correct bf16", "correct norms", "correct gathers", "replays"} <= report["found"].keys()

"""`--comm auto`: the table of measured times, the choice of an algorithm, the checks of the file, one table for all ranks."""

import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comm import choose
from comm.table import SIZES, TOLERANCE, Table, Times, agreed, path_of, read, write
from errors import UserError
from tests.support.ranks import RankError, Ranks
from tp import World

KEY = {"gpu": "test", "ranks": "8"}
SERVED = {"nccl": SIZES, "one-shot": SIZES[:9], "two-shot": SIZES[3:], "int8": SIZES[6:]}
EXACT = ["nccl", "one-shot", "two-shot"]


def random_times(seed: int) -> Times:
    draw = random.Random(seed)
    return {
        name: {n: draw.uniform(5, 20) + n / draw.uniform(1e5, 4e5) for n in sizes}  # µs: latency, then 100 to 400 GB/s
        for name, sizes in SERVED.items()
    }


def table_of(seed: int) -> Table:
    return Table(KEY, time.time() - 100, random_times(seed))


# --- the choice --------------------------------------------------------------------------------------------------------------


def test_the_choice_is_the_fastest_and_never_slower_than_nccl(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        times = random_times(draw.randrange(2**31))
        table = Table(KEY, 1.0, times)
        for size in SIZES:
            chosen = times[table.choose(size)][size]
            assert chosen <= TOLERANCE * times["nccl"][size], f"seed {seed}: {size} bytes"
            assert chosen == min(t[size] for t in times.values() if size in t), f"seed {seed}: {size} bytes"
        for size in (int(2 ** draw.uniform(0, 30)) for _ in range(50)):
            name = table.choose(size)
            assert math.isfinite(table.microseconds(name, size))
            assert table.microseconds(name, size) <= TOLERANCE * table.microseconds("nccl", size), f"seed {seed}: {size} bytes"


def test_between_two_sizes_nothing_slower_at_either_is_taken() -> None:
    times: Times = {"nccl": {n: 20.0 + n / 1e6 for n in SIZES}, "one-shot": dict.fromkeys(SIZES[:4], 5.0), "two-shot": {}}
    times["one-shot"][SIZES[3]] = 30.0
    table = Table(KEY, 1.0, times)
    assert table.choose(SIZES[2]) == "one-shot"
    assert table.choose(SIZES[2] + 2) == "nccl"  # one-shot is faster at the size below but slower at the size above
    assert table.choose(1) == "one-shot" and table.choose(1 << 30) == "nccl"


def test_times_are_interpolated() -> None:
    table = Table(KEY, 1.0, {"nccl": {n: n / 100 for n in SIZES}, "one-shot": {1024: 3.0, 2048: 5.0}})
    assert table.microseconds("one-shot", 1536) == pytest.approx(4.0)
    assert table.microseconds("one-shot", 10) == pytest.approx(3.0)
    assert table.microseconds("one-shot", 3000) == math.inf
    assert table.microseconds("nccl", 4 * SIZES[-1]) == pytest.approx(4 * SIZES[-1] / 100)


# --- the file ----------------------------------------------------------------------------------------------------------------


def test_a_table_survives_the_disk(tmp_path: Path, seed: int) -> None:
    table = table_of(seed)
    write(tmp_path / "new folder" / "table.json", table)
    assert read(tmp_path / "new folder" / "table.json", KEY, SERVED) == table
    assert os.listdir(tmp_path / "new folder") == ["table.json"]


def spoil(name: str) -> Callable[[dict[str, Any]], Any]:
    """A function that makes the content of a table's file invalid in the named way."""

    def change(content: dict[str, Any]) -> Any:
        nccl = content["times"]["nccl"]
        if name == "another machine":
            content["key"]["gpu"] = "other"
        elif name == "from the future":
            content["made"] = time.time() + 1e6
        elif name == "no times":
            del content["times"]
        elif name == "a way missing":
            del content["times"]["two-shot"]
        elif name == "a size missing":
            del nccl[str(SIZES[5])]
        elif name == "larger is faster":
            nccl[str(SIZES[-1])] = nccl[str(SIZES[0])] / 2
        elif name == "a list":
            return [content]
        else:
            nccl[str(SIZES[5])] = {"negative": -1.0, "zero": 0.0, "nan": math.nan, "infinite": math.inf, "text": "fast"}[name]
        return content

    return change


SPOILED = ("another machine", "from the future", "no times", "a way missing", "a size missing", "larger is faster", "a list")
SPOILED += ("negative", "zero", "nan", "infinite", "text")


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_table_is_none(tmp_path: Path, name: str, seed: int) -> None:
    path = tmp_path / "table.json"
    write(path, table_of(seed))
    path.write_text(json.dumps(spoil(name)(json.loads(path.read_text()))))
    assert read(path, KEY, SERVED) is None


def test_a_torn_table_is_none(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "table.json"
    assert read(path, KEY, SERVED) is None
    write(path, table_of(seed))
    whole = path.read_bytes()
    for end in random.Random(seed).sample(range(len(whole)), 30):
        path.write_bytes(whole[:end])
        assert read(path, KEY, SERVED) is None, f"seed {seed}: {end} of {len(whole)} bytes"
    path.write_bytes(b"\xff\xfe" + whole)
    assert read(path, KEY, SERVED) is None


# --- the ranks ---------------------------------------------------------------------------------------------------------------


def agree(world: World, folder: str, seed: int, rebuild: bool = False, spoiled: bool = False) -> tuple[Times, bool]:
    """(the table's times, whether this rank measured). Each rank has its own cache folder and measures different times."""
    os.environ["RUNG_CACHE"] = f"{folder}/{world.rank}"
    measured = []

    def measure() -> Times:
        measured.append(True)
        times = random_times(seed + world.rank)
        return times | {"nccl": dict.fromkeys(SIZES, -1.0)} if spoiled else times

    try:
        return agreed(KEY, SERVED, measure, rebuild=rebuild).times, bool(measured)
    finally:
        del os.environ["RUNG_CACHE"]


def test_all_ranks_have_rank_0s_table(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    times = random_times(seed)
    assert ranks.run(2, agree, str(tmp_path), seed) == [(times, True)] * 2
    assert os.listdir(tmp_path) == ["0"]  # only rank 0 writes a file
    assert ranks.run(2, agree, str(tmp_path), seed + 5) == [(times, False)] * 2  # read from the file
    assert ranks.run(2, agree, str(tmp_path), seed + 5, True) == [(random_times(seed + 5), True)] * 2  # rebuilt
    (file,) = (tmp_path / "0").iterdir()
    file.write_text(file.read_text()[:-20])
    assert ranks.run(2, agree, str(tmp_path), seed + 9) == [(random_times(seed + 9), True)] * 2  # cut off, so measured again


def test_a_cache_that_cannot_be_written_does_no_harm(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    (tmp_path / "0").write_text("a file where the folder should be")
    assert ranks.run(2, agree, str(tmp_path), seed) == [(random_times(seed), True)] * 2


def test_implausible_times_are_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    with pytest.raises(RankError, match="implausible") as failed:
        ranks.run(2, agree, str(tmp_path), seed, False, True)
    assert "rank 0 of 2" in str(failed.value) and "rank 1 of 2" in str(failed.value)
    assert not (tmp_path / "0").exists()


def test_another_machine_has_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    assert path_of(KEY).parent == tmp_path and path_of(KEY) != path_of(KEY | {"ranks": "4"})
    monkeypatch.delenv("RUNG_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of(KEY).parent == tmp_path / ".cache" / "rung"


# --- the communicator --------------------------------------------------------------------------------------------------------


def chosen(world: World, seed: int) -> list[str]:
    from comm.auto import AutoCommunicator, auto

    assert auto(torch.device("cpu")).name == "gloo"

    class Named(type(world.comm)):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def start(self, partial: torch.Tensor) -> Any:
            started.append(self.name)
            return super().start(partial)

    started: list[str] = []
    table = table_of(seed)
    comm = AutoCommunicator({name: Named(name) for name in SERVED}, table)
    for size in (4, 1024, 8192, 1 << 20):
        total = comm.all_reduce(torch.full((size // 4,), 2.0 + world.rank))
        assert total.eq(sum(2.0 + rank for rank in range(world.world_size))).all()
        assert started.pop() == table.choose(size)
        comm.start(torch.zeros(size // 4)).wait()
        assert started[-1] == table.choose(size, EXACT)
    return started


def test_the_communicator_follows_the_table(ranks: Ranks, seed: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install triton")
    first, second = ranks.run(2, chosen, seed)
    table = table_of(seed)
    assert first == second == [table.choose(size, EXACT) for size in (4, 1024, 8192, 1 << 20)]


def within(world: World, budget: float) -> list[str]:
    from comm.auto import schemes_within

    return [scheme.name for scheme in schemes_within(budget)]


@pytest.mark.parametrize(
    ("budget", "names"),
    [(0.0, []), (0.001, []), (0.01, ["int8"]), (0.05, ["int8", "fp8"]), (0.12, ["int8", "int6", "fp8"])],
)
def test_widths_within_an_error_budget(ranks: Ranks, budget: float, names: list[str]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install triton")
    assert ranks.run(2, within, budget) == [names] * 2


def test_a_budget_is_for_auto() -> None:
    assert choose("cuda", "auto", error_budget=0.01).error_budget == 0.01
    for name, budget in (("nccl", 0.01), ("int8", 0.01), ("auto", -0.1), ("auto", 1.0), ("auto", float("nan"))):
        with pytest.raises(UserError, match="comm-error-budget"):
            choose("cuda", name, error_budget=budget)
    with pytest.raises(UserError, match="comm-error-budget"):
        choose("cpu", error_budget=0.01)


def test_the_table_as_text(seed: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install triton")
    from scripts.bench.comm.auto_table import lines

    table = replace(table_of(seed), made=1000.0)
    text = lines(table, 1000.0 + 3 * 86400)
    assert "3 days old" in text[0] and "gpu test" in text[1]
    rows = [line.split() for line in text[4:]]
    assert [row[-1] for row in rows] == [table.choose(size) for size in SIZES]
    assert rows[0][:2] == ["1", "KiB"] and rows[-1][:2] == ["64", "MiB"] and rows[-1][3] == "–"


def test_pairs_of_layers_as_text() -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install triton")
    from comm.fused_table import PairTable
    from scripts.bench.comm.auto_table import pair_lines

    times = {"unfused": 100.0, "spans+spans": 90.0, "owners+spans": 80.0, "spans+owners": 95.0}
    slow = {name: 200.0 - t for name, t in times.items()}
    text = pair_lines(PairTable({}, {"1024,8,8,8,bfloat16": times, "64,8,8,8,bfloat16": slow}))
    assert text[-2].split() == ["1024,8,8,8,bfloat16", "100.0", "80.0", "+20.0", "owners+spans"]
    assert text[-1].split() == ["64,8,8,8,bfloat16", "100.0", "105.0", "-5.0", "spans+owners"]
    assert "no model" in pair_lines(PairTable({}))[-1]

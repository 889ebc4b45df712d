"""Snapshots of a training run: loading gives what was saved, for any ranks that saved it and any time they were killed."""

import errno
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import training.snapshot_folder
from errors import UserError
from training.snapshot import KEYS, Piece, Snapshots
from training.snapshot_folder import check_fits, complete_snapshots, read_manifest, write_json

Shapes = dict[str, tuple[int, ...]]
State = dict[str, dict[str, Tensor]]
SHAPES: Shapes = {"embedding": (7, 5), "norm": (5,), "head": (3, 5), "scalar": ()}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if possible. Every snapshot waits for the disk several times, and a test's disk may be busy."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.snapshot, "POLL_SECONDS", 0.002)


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def random_state(shapes: Shapes, generator: torch.Generator) -> State:
    """Random bits, including NaNs and infinities: fp32 (numel,) for each parameter and key."""
    bits = {n: {k: torch.randint(-(2**31), 2**31, (numel(s),), generator=generator) for k in KEYS} for n, s in shapes.items()}
    return {name: {key: tensor.int().view(torch.float32) for key, tensor in keys.items()} for name, keys in bits.items()}


def cut(shapes: Shapes, ranks: int, rng: random.Random) -> list[list[tuple[str, int, int]]]:
    """Cut every parameter at random places and give each range to a random rank, in random order."""
    owned: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        size = numel(shape)
        edges = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 4)))})
        for start, stop in pairwise(edges):
            owned[rng.randrange(ranks)].append((name, start, stop))
    for ranges in owned:
        rng.shuffle(ranges)
    return owned


def pieces_of(state: State, ranges: list[tuple[str, int, int]]) -> list[Piece]:
    return [Piece(name, start, stop, {k: state[name][k][start:stop] for k in KEYS}) for name, start, stop in ranges]


def whole(shapes: Shapes = SHAPES) -> list[tuple[str, int, int]]:
    return [(name, 0, numel(shape)) for name, shape in shapes.items()]


def run_of(folder: Path, ranks: int = 1, run_id: str = "a", **options: Any) -> list[Snapshots]:
    return [Snapshots(folder, rank, ranks, run_id=run_id, **options) for rank in range(ranks)]


def save(
    run: list[Snapshots], step: int, state: State, owned: list[list[tuple[str, int, int]]], shapes: Shapes = SHAPES
) -> None:
    for snapshots, ranges in zip(run, owned, strict=True):
        snapshots.save(step, pieces_of(state, ranges), shapes, {"seed": step})


def wait(run: list[Snapshots]) -> None:
    for snapshots in run:
        snapshots.wait()


def saved(folder: Path, step: int, seed: int, **options: Any) -> tuple[Snapshots, State]:
    """Save a snapshot from one rank; return its `Snapshots` and the saved state."""
    state = random_state(SHAPES, torch.Generator().manual_seed(seed + step))
    run = run_of(folder, **options)
    save(run, step, state, [whole()])
    wait(run)
    return run[0], state


def assert_loads(snapshots: Snapshots, path: Path, state: State, wanted: list[tuple[str, int, int]]) -> None:
    for (name, start, stop), found in zip(wanted, snapshots.load(path, wanted), strict=True):
        assert found.keys() == set(KEYS)
        for key in KEYS:
            assert found[key].shape == (stop - start,) and found[key].dtype == torch.float32
            assert torch.equal(found[key].view(torch.int32), state[name][key][start:stop].view(torch.int32)), (name, key)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- loading gives what was saved ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    shapes=st.dictionaries(
        st.text("ab.", min_size=1, max_size=4), st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=5
    ),
    writers=st.integers(1, 5),
    readers=st.integers(1, 5),
    block=st.sampled_from([4, 12, 64, 2**24]),
    seed=st.integers(0, 2**31),
)
def test_any_cut_is_read_by_any_other(
    tmp_path: Path, shapes: Shapes, writers: int, readers: int, block: int, seed: int
) -> None:
    rng, folder = random.Random(seed), Path(tempfile.mkdtemp(dir=tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.snapshot_folder, "BLOCK_BYTES", block)
        state = random_state(shapes, torch.Generator().manual_seed(seed))
        run = run_of(folder, writers)
        save(run, 3, state, cut(shapes, writers, rng), shapes)
        wait(run)
        path = run[0].latest()
        assert path == folder / "step-00000003"
        check_fits(path, shapes)
        for wanted in cut(shapes, readers, rng):
            assert_loads(run[0], path, state, wanted)


def test_manifest_says_what_the_run_is_and_files_are_safetensors(tmp_path: Path, seed: int) -> None:
    snapshots, state = saved(tmp_path, 12, seed)
    path = snapshots.latest()
    assert path is not None
    manifest = read_manifest(path)
    assert manifest["step"] == 12 and manifest["meta"] == {"seed": 12}
    assert names(path) == ["manifest.json", "rank-0.safetensors"]
    tensors = load_file(path / "rank-0.safetensors")
    assert len(tensors) == len(SHAPES) * len(KEYS)
    head = tensors["head[0:15].exp_avg"]
    assert torch.equal(head.view(torch.int32), state["head"]["exp_avg"].view(torch.int32))


def test_a_reader_touches_only_the_files_and_blocks_that_it_needs(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.snapshot_folder, "BLOCK_BYTES", 64)
    state = random_state(SHAPES, torch.Generator().manual_seed(seed))
    run = run_of(tmp_path, 2)
    save(run, 1, state, [[("embedding", 0, 35)], [("norm", 0, 5), ("head", 0, 15), ("scalar", 0, 1)]])
    wait(run)
    path = tmp_path / "step-00000001"
    (path / "rank-1.safetensors").unlink()
    data = bytearray((path / "rank-0.safetensors").read_bytes())
    data[-1] ^= 1  # a bit of the last block, which holds the end of exp_avg_sq
    (path / "rank-0.safetensors").write_bytes(data)
    assert_loads(run[0], path, state, [("embedding", 0, 10)])
    with pytest.raises(UserError, match=r"rank-0.safetensors is damaged"):
        run[0].load(path, [("embedding", 30, 35)])
    with pytest.raises(UserError, match=r"rank-1.safetensors cannot be read"):
        run[0].load(path, [("norm", 0, 1)])


def test_save_returns_before_the_files_are_written(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may change its tensors then, and a second save waits."""
    release = hold_writes(monkeypatch)
    state = random_state(SHAPES, torch.Generator().manual_seed(seed))
    kept = {name: {key: tensor.clone() for key, tensor in keys.items()} for name, keys in state.items()}
    run, meta = run_of(tmp_path), {"seed": 1}
    run[0].save(1, pieces_of(state, whole()), SHAPES, meta)
    meta["seed"] = 2
    for keys in state.values():
        for tensor in keys.values():
            tensor.zero_()
    assert run[0].latest() is None
    threading.Timer(0.2, release.set).start()
    save(run, 2, state, [whole()])
    assert (tmp_path / "step-00000001").is_dir() and release.is_set()
    wait(run)
    assert_loads(run[0], tmp_path / "step-00000001", kept, whole())
    assert_loads(run[0], tmp_path / "step-00000002", state, whole())
    assert read_manifest(tmp_path / "step-00000001")["meta"] == {"seed": 1}


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make every write of a tensor file wait until the returned event is set."""
    release, write = threading.Event(), training.snapshot.write

    def held(*args: Any) -> Any:
        assert release.wait(200)
        return write(*args)

    monkeypatch.setattr(training.snapshot, "write", held)
    return release


# --- listing and removing snapshots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, seed: int, keep: int) -> None:
    run = run_of(tmp_path, keep=keep)
    for step in range(10, 60, 10):
        save(run, step, random_state(SHAPES, torch.Generator().manual_seed(seed)), [whole()])
        wait(run)
    assert names(tmp_path) == [f"step-{step:08d}" for step in range(60 - 10 * keep, 60, 10)]


def test_the_snapshot_just_written_stays_even_behind_later_steps(tmp_path: Path, seed: int) -> None:
    for step in (100, 200):
        saved(tmp_path, step, seed)
    saved(tmp_path, 50, seed, run_id="b")
    assert names(tmp_path) == ["step-00000050", "step-00000200"]


def test_a_snapshot_whose_removal_was_killed_is_none(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # as if killed before the data are deleted
        patch.setattr(training.snapshot_folder.shutil, "rmtree", lambda *_, **__: None)
        for step in (1, 2, 3):
            snapshots, _ = saved(tmp_path, step, seed, keep=1)
    assert names(tmp_path / "step-00000001") == ["rank-0.safetensors"]
    assert complete_snapshots(tmp_path) == [tmp_path / "step-00000003"] == [snapshots.latest()]


def test_latest_skips_what_is_incomplete_and_a_save_clears_it_away(tmp_path: Path, seed: int) -> None:
    snapshots, state = saved(tmp_path, 5, seed)
    for name in ("step-00000006.b-1.partial", "step-00000005.c-7.partial", "step-00000007", "step-00000008.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert snapshots.latest() == tmp_path / "step-00000005"
    snapshots, new = saved(tmp_path, 6, seed, run_id="d")
    assert names(tmp_path) == ["notes.txt", "step-00000005", "step-00000006"]
    assert_loads(snapshots, tmp_path / "step-00000005", state, whole())
    assert_loads(snapshots, tmp_path / "step-00000006", new, whole())


def test_files_of_a_killed_run_never_get_into_a_snapshot(tmp_path: Path, seed: int) -> None:
    """In the killed run, ranks 0 and 1 of three had finished their parts of the same step."""
    rng = random.Random(seed)
    old, new = (random_state(SHAPES, torch.Generator().manual_seed(seed + i)) for i in range(2))
    killed, owned = run_of(tmp_path, 3, timeout=0.1), cut(SHAPES, 3, rng)
    for rank in (1, 0):  # rank 0 waits for the others
        killed[rank].save(8, pieces_of(old, owned[rank]), SHAPES, {})
        with pytest.raises(UserError) if rank == 0 else nullcontext():
            killed[rank].wait()
    (left,) = tmp_path.glob("*.partial")
    assert "rank-1.json" in names(left)
    run = run_of(tmp_path, 2, run_id="b")
    save(run, 8, new, cut(SHAPES, 2, rng))
    wait(run)
    assert names(tmp_path) == ["step-00000008"]
    assert_loads(run[0], tmp_path / "step-00000008", new, whole())


# --- kills ---------------------------------------------------------------------------------------------------------------


def filled(step: int, rank: int, ranks: int) -> list[Piece]:
    """This rank's part of 200,000 elements, all equal to the step."""
    size = 200_000 // ranks
    return [Piece("weight", rank * size, (rank + 1) * size, {key: torch.full((size,), float(step)) for key in KEYS})]


def save_forever(folder: Path, rank: int, ranks: int, run_id: str, first: int) -> None:
    torch.set_num_threads(1)
    snapshots = Snapshots(folder, rank, ranks, run_id=run_id, keep=1, timeout=120)
    for step in range(first, first + 10**6):
        snapshots.save(step, filled(step, rank, ranks), {"weight": (200_000,)}, {"step": step})
        snapshots.wait()


def newest_step(folder: Path) -> int:
    """Of the snapshots that are complete; 0 if there are none."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-????????")), default=0)


def test_a_kill_at_any_instant_leaves_a_whole_snapshot(tmp_path: Path, seed: int) -> None:
    rng, context, last = random.Random(seed), multiprocessing.get_context("fork"), 0
    reader = Snapshots(tmp_path, 0, 1, run_id="reader")
    for attempt in range(10):
        processes = [context.Process(target=save_forever, args=(tmp_path, r, 2, f"run{attempt}", last + 1)) for r in range(2)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 120  # wait until the first run has saved twice, then for a random time
        while attempt == 0 and not newest_step(tmp_path) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.4))
        for process in rng.sample(processes, 2):
            os.kill(process.pid or 0, signal.SIGKILL)
            time.sleep(rng.choice([0.0, 0.05]))
        for process in processes:
            process.join()
        path = reader.latest()
        assert path is not None
        step = read_manifest(path)["step"]
        assert step >= last and read_manifest(path)["meta"] == {"step": step}
        (found,) = reader.load(path, [("weight", 0, 200_000)])
        for key in KEYS:
            assert torch.equal(found[key], torch.full((200_000,), float(step)))
        last = step
    assert last > 1


# --- failed writes -------------------------------------------------------------------------------------------------------


def broken(path: Path, *_: object) -> None:
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_write_is_told_and_the_last_snapshot_stays(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    rng = random.Random(seed)
    good, lost, later = (random_state(SHAPES, torch.Generator().manual_seed(seed + i)) for i in range(3))
    run = run_of(tmp_path, 2, keep=1, timeout=120)
    owned = [[("embedding", 0, 20), ("norm", 0, 5)], [("embedding", 20, 35), ("head", 0, 15), ("scalar", 0, 1)]]
    save(run, 1, good, owned)
    wait(run)
    write = training.snapshot.write
    with monkeypatch.context() as patch:
        patch.setattr(
            training.snapshot, "write", lambda p, *a: (broken if p.name == f"rank-{rank}.safetensors" else write)(p, *a)
        )
        save(run, 2, lost, owned)
        for snapshots in run[rank::-1]:  # rank 0 reports rank 1's failure, too
            with pytest.raises(UserError, match=r"step 2 .*No space left.*step-00000001 is still complete"):
                snapshots.wait()
        if rank == 0:
            run[1].wait()
    assert not list(tmp_path.glob(f"*.partial/rank-{rank}.safetensors"))
    assert run[0].latest() == tmp_path / "step-00000001"
    assert_loads(run[0], tmp_path / "step-00000001", good, whole())
    save(run, 2, later, cut(SHAPES, 2, rng))  # writes succeed again, and leftovers of the failed save do not disturb
    wait(run)
    assert names(tmp_path) == ["step-00000002"]
    assert_loads(run[0], tmp_path / "step-00000002", later, whole())


@pytest.mark.parametrize("limit", [0, 100, 1_000_000, 2_399_999])
def test_a_file_that_the_system_cuts_off(tmp_path: Path, seed: int, limit: int) -> None:
    snapshots, state = saved(tmp_path, 1, seed)
    later, limits = Snapshots(tmp_path, 0, 1, run_id="b"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))  # of all threads: this one only waits
    try:
        later.save(2, filled(2, 0, 1), {"weight": (200_000,)}, {})
        with pytest.raises(UserError, match=r"step 2 .*File too large.*step-00000001 is still complete"):
            later.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshots.latest() == tmp_path / "step-00000001"
    assert_loads(snapshots, tmp_path / "step-00000001", state, whole())


def test_an_unwritable_directory(tmp_path: Path, seed: int) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"could not be written: .*file.*there is no earlier snapshot"):
        saved(tmp_path / "file", 1, seed)


def test_an_unexpected_error_in_the_background_is_not_lost(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(training.snapshot, "write", broken)
    with pytest.raises(ZeroDivisionError):
        saved(tmp_path, 1, seed)


def test_a_rank_that_never_finishes_is_named(tmp_path: Path, seed: int) -> None:
    saved(tmp_path, 1, seed)
    state, owned = random_state(SHAPES, torch.Generator().manual_seed(seed)), cut(SHAPES, 4, random.Random(seed))
    run = run_of(tmp_path, 4, run_id="b", timeout=0.1)
    run[2].save(2, pieces_of(state, owned[2]), SHAPES, {})
    run[2].wait()
    run[0].save(2, pieces_of(state, owned[0]), SHAPES, {})
    with pytest.raises(UserError, match=r"ranks 1, 3 wrote nothing more to .* for 0.1 s.*step-00000001 is still complete"):
        run[0].wait()
    assert run[0].latest() == tmp_path / "step-00000001"


def test_a_slow_rank_has_time_while_its_file_grows(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write, now, looked = training.snapshot.write, [0.0], threading.Semaphore(0)

    def slow(path: Path, *args: Any) -> Any:
        for size in range(1, 11):
            path.write_bytes(b"x" * size)
            while looked.acquire(blocking=False):
                pass
            for _ in range(2):  # rank 0 has begun to look and looked
                assert looked.acquire(timeout=60)
            now[0] += 2.0
        return write(path, *args)

    def sleep(seconds: float) -> None:
        looked.release()
        time.sleep(seconds)

    monkeypatch.setattr(training.snapshot, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(training.snapshot, "write", lambda p, *a: (slow if p.name.startswith("rank-1.") else write)(p, *a))
    run = run_of(tmp_path, 2, timeout=3.0)
    save(run, 1, random_state(SHAPES, torch.Generator().manual_seed(seed)), [[], whole()])
    wait(run)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([("norm", 0, 5)], "the ranks have embedding up to element 0 of 35"),
        ([*whole(), ("norm", 2, 3)], "norm from element 2 on, but 5 was next"),
        ([(n, a, b) for n, a, b in whole() if n != "norm"] + [("norm", 0, 2), ("norm", 3, 5)], "norm from element 3 on, but 2"),
    ],
)
def test_pieces_that_do_not_cover_the_model_once_are_no_snapshot(
    tmp_path: Path, seed: int, owned: list[tuple[str, int, int]], message: str
) -> None:
    state = random_state(SHAPES, torch.Generator().manual_seed(seed))
    run = run_of(tmp_path)
    save(run, 1, state, [owned])
    with pytest.raises(UserError, match=message):
        wait(run)
    assert run[0].latest() is None


# --- damaged and foreign snapshots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["rank-0.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "gone"])
def test_a_torn_snapshot_is_refused_and_the_good_one_is_named(tmp_path: Path, seed: int, file: str, harm: str) -> None:
    rng = random.Random(seed)
    saved(tmp_path, 1, seed)
    snapshots, _ = saved(tmp_path, 2, seed)
    newest = snapshots.latest()
    assert newest is not None and newest.name == "step-00000002"
    data = bytearray((newest / file).read_bytes())
    if harm == "gone":
        (newest / file).unlink()
    elif harm == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if harm != "gone":
        (newest / file).write_bytes({"cut": data[: rng.randrange(1, len(data))], "flip": data, "empty": b""}[harm])
    if (file, harm) == ("manifest.json", "gone"):  # without a manifest a snapshot is incomplete
        assert snapshots.latest() == tmp_path / "step-00000001"
        return
    with pytest.raises(UserError) as caught:
        snapshots.load(newest, whole())
    message = str(caught.value)
    assert str(newest / file) in message and "\n" not in message
    foreign = harm == "flip" and re.search(r"has format \d|not that of a training snapshot", message)  # the bit was in "format"
    assert "go on from step-00000001" in message or foreign
    older = tmp_path / "step-00000001"
    assert_loads(snapshots, older, random_state(SHAPES, torch.Generator().manual_seed(seed + 1)), whole())


def test_a_torn_older_one_is_not_recommended(tmp_path: Path, seed: int) -> None:
    for step in (1, 2, 3, 4):
        snapshots, _ = saved(tmp_path, step, seed, keep=4)
    os.truncate(tmp_path / "step-00000004" / "rank-0.safetensors", 99)
    os.truncate(tmp_path / "step-00000003" / "rank-0.safetensors", 99)
    os.truncate(tmp_path / "step-00000002" / "manifest.json", 99)
    with pytest.raises(UserError, match=r"99 bytes instead of .*; delete .*step-00000004 to go on from step-00000001"):
        snapshots.load(tmp_path / "step-00000004", whole())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (SHAPES | {"embedding": (5, 7)}, r"embedding has shape \(7, 5\) there and shape \(5, 7\) in this model"),
        (SHAPES | {"bias": (5,)}, r"bias has no place there and shape \(5,\)"),
        ({n: s for n, s in SHAPES.items() if n != "scalar"}, r"scalar has shape \(\) there and no place in this model"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, seed: int, shapes: Shapes, message: str) -> None:
    saved(tmp_path, 1, seed)
    check_fits(tmp_path / "step-00000001", SHAPES)
    with pytest.raises(UserError, match=message):
        check_fits(tmp_path / "step-00000001", shapes)


@pytest.mark.parametrize("wanted", [("other", 0, 1), ("norm", 0, 6), ("norm", -1, 2), ("norm", 3, 2)])
def test_elements_that_are_not_there(tmp_path: Path, seed: int, wanted: tuple[str, int, int]) -> None:
    snapshots, _ = saved(tmp_path, 1, seed)
    with pytest.raises(UserError, match=rf"{wanted[0]}, not those from {wanted[1]} to {wanted[2]}"):
        snapshots.load(tmp_path / "step-00000001", [wanted])


def test_another_format_and_what_is_no_snapshot(tmp_path: Path, seed: int) -> None:
    saved(tmp_path, 1, seed)
    file = tmp_path / "step-00000001" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads 1"):
        check_fits(file.parent, SHAPES)
    for text in ("[]", '"format"', "{}", '{"manifest_version": 3}'):
        file.write_text(text)
        with pytest.raises(UserError, match="not that of a training snapshot"):
            check_fits(file.parent, SHAPES)
    for path in (tmp_path, tmp_path / "none", file):
        with pytest.raises(UserError, match="no complete snapshot"):
            check_fits(path, SHAPES)


def test_a_folder_may_be_renamed_as_soon_as_a_file_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 renames the folder once it sees the last part's file, perhaps before the rank that wrote the file continues."""
    folder, rename = tmp_path / "step.partial", Path.rename
    folder.mkdir()

    def rename_both(self: Path, target: Path) -> None:
        rename(self, target)
        rename(folder, tmp_path / "step")

    monkeypatch.setattr(Path, "rename", rename_both)
    write_json(folder / "rank-1.json", {"file": None})
    assert json.loads((tmp_path / "step" / "rank-1.json").read_text()) == {"file": None}

"""Snapshots: any ranks write, any others read, and nothing that happens in between loses the last good one."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from tests.command_line import ROOT, environment
from training.snapshot import KEYS, Piece, Snapshots, check_fits, read_manifest

Shapes = dict[str, tuple[int, ...]]
Ranges = list[list[tuple[str, int, int]]]  # by rank


def states(shapes: Shapes, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {name: {key: torch.randn(torch.Size(s).numel(), generator=generator) for key in KEYS} for name, s in shapes.items()}


def split(shapes: Shapes, world_size: int, rng: random.Random) -> Ranges:
    """Cut every parameter at random places, and give each piece to a random rank."""
    ranges: Ranges = [[] for _ in range(world_size)]
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.randrange(4)))})
        for start, stop in pairwise(cuts):
            ranges[rng.randrange(world_size)].append((name, start, stop))
    return ranges


def write(
    directory: Path,
    step: int,
    shapes: Shapes,
    whole: dict[str, dict[str, torch.Tensor]],
    ranges: Ranges,
    run_id: str = "a",
    **more: int,
) -> None:
    """Save from one `Snapshots` a rank, in this process; the first error is raised."""
    ranks = [Snapshots(directory, rank, len(ranges), run_id=run_id, **more) for rank in range(len(ranges))]
    for snapshots, mine in zip(ranks, ranges, strict=True):
        pieces = [Piece(n, a, b, {key: whole[n][key][a:b] for key in KEYS}) for n, a, b in mine]
        snapshots.save(step, pieces, shapes, {"seed": 1})
    for snapshots in ranks:
        snapshots.wait()


def read(directory: Path, whole: dict[str, dict[str, torch.Tensor]], ranges: Sequence[tuple[str, int, int]]) -> None:
    """Every range, from the newest snapshot, equals the same range of `whole`."""
    snapshots = Snapshots(directory, 0, 1)
    path = snapshots.latest()
    assert path is not None
    for (name, start, stop), found in zip(ranges, snapshots.load(path, ranges), strict=True):
        for key in KEYS:
            assert torch.equal(found[key], whole[name][key][start:stop])


SHAPES = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, before=st.integers(1, 4), after=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_any_ranks_read_what_any_ranks_wrote(
    tmp_path_factory: pytest.TempPathFactory, shapes: Shapes, before: int, after: int, seed: int
) -> None:
    directory, rng = tmp_path_factory.mktemp("any"), random.Random(seed)
    whole = states(shapes, seed)
    write(directory, 3, shapes, whole, split(shapes, before, rng))
    for mine in split(shapes, after, rng):
        read(directory, whole, mine)


ONE: Shapes = {"w": (4, 5), "v": (3,)}
ALL: Ranges = [[("w", 0, 20), ("v", 0, 3)]]


def test_old_snapshots_go_and_the_newest_is_the_latest(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path, step, ONE, states(ONE, step), ALL, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]
    read(tmp_path, states(ONE, 10), ALL[0])


def test_what_a_killed_run_left_is_never_mixed_in(tmp_path: Path) -> None:
    halves: Ranges = [[("w", 0, 20)], [("v", 0, 3)]]
    write(tmp_path, 1, ONE, states(ONE, 1), ALL)
    killed = Snapshots(tmp_path, 1, 2, run_id="killed")  # rank 0 of this run died before it wrote
    killed.save(2, [Piece("v", 0, 3, {key: torch.zeros(3) for key in KEYS})], ONE, {})
    killed.wait()
    assert (tmp_path / "step-00000002.partial").is_dir()
    read(tmp_path, states(ONE, 1), ALL[0])
    write(tmp_path, 2, ONE, states(ONE, 2), halves, run_id="next")
    read(tmp_path, states(ONE, 2), ALL[0])
    assert not list(tmp_path.glob("*.partial"))
    assert not [p for p in (tmp_path / "step-00000002").iterdir() if "killed" in p.name]


def test_a_slow_rank_is_waited_for_and_a_lost_one_is_named(tmp_path: Path) -> None:
    first = Snapshots(tmp_path, 0, 2, timeout=0.3)
    first.save(1, [Piece("w", 0, 20, states(ONE, 0)["w"])], ONE, {})
    with pytest.raises(UserError, match="rank 1 did not write its part"):
        first.wait()
    assert first.latest() is None
    patient, late = Snapshots(tmp_path, 0, 2, run_id="b"), Snapshots(tmp_path, 1, 2, run_id="b")
    whole = states(ONE, 4)
    patient.save(2, [Piece("w", 0, 20, whole["w"])], ONE, {})
    threading.Timer(0.2, late.save, (2, [Piece("v", 0, 3, whole["v"])], ONE, {})).start()
    patient.wait()
    read(tmp_path, whole, ALL[0])


def test_another_ranks_failure_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import training.snapshot as snapshot

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    whole = states(ONE, 0)
    first, second = (Snapshots(tmp_path, rank, 2, timeout=60) for rank in range(2))
    first.save(1, [], ONE, {})
    monkeypatch.setattr(snapshot, "save_file", full)
    second.save(1, [Piece("w", 0, 20, whole["w"])], ONE, {})
    start = time.monotonic()
    for ranks in (first, second):
        with pytest.raises(UserError, match="No space left on device"):
            ranks.wait()
    assert time.monotonic() - start < 30  # half of the timeout that it would else have run into


@pytest.mark.parametrize("pieces", [[("w", 0, 19), ("v", 0, 3)], [("w", 0, 20)], [("w", 0, 20), ("w", 5, 6), ("v", 0, 3)]])
def test_pieces_that_do_not_cover_everything_once_are_refused(tmp_path: Path, pieces: list[tuple[str, int, int]]) -> None:
    with pytest.raises(UserError, match="this is a bug"):
        write(tmp_path, 1, ONE, states(ONE, 1), [pieces])
    assert Snapshots(tmp_path, 0, 1).latest() is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_torn_file_is_found_and_the_older_snapshot_named(tmp_path: Path, damage: str, seed: int) -> None:
    write(tmp_path, 1, ONE, states(ONE, 1), ALL)
    write(tmp_path, 2, ONE, states(ONE, 2), ALL)
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(data[: random.Random(seed).randrange(len(data))])
    else:
        data[random.Random(seed).randrange(len(data))] ^= 1 << random.Random(seed).randrange(8)
        file.write_bytes(data)
    snapshots = Snapshots(tmp_path, 0, 1)
    with pytest.raises(UserError, match=r"torn or missing.*step-00000001"):
        snapshots.load(tmp_path / "step-00000002", ALL[0])
    snapshots.load(tmp_path / "step-00000001", ALL[0])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_torn_or_foreign_manifest_says_so(tmp_path: Path, text: str) -> None:
    write(tmp_path, 1, ONE, states(ONE, 1), ALL)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.write_text(text)
    with pytest.raises(UserError, match="no snapshot of format"):
        read_manifest(manifest.parent)


def test_a_snapshot_of_another_model_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path, 1, ONE, states(ONE, 1), ALL)
    path = tmp_path / "step-00000001"
    check_fits(path, ONE)
    for other in ({"w": (5, 4), "v": (3,)}, {"w": (4, 5)}, ONE | {"u": (1,)}):
        with pytest.raises(UserError, match="of another model"):
            check_fits(path, other)
    with pytest.raises(UserError, match="does not hold all of w"):
        Snapshots(tmp_path, 0, 1).load(path, [("w", 0, 21)])


SAVE_FOREVER = """
import sys; from pathlib import Path; from tests.test_snapshot import ALL, ONE, states, write
for step in range(1, 100000):
    write(Path(sys.argv[1]), step, ONE, states(ONE, step), ALL, run_id=sys.argv[2])
"""


def test_killed_at_any_instant_a_whole_snapshot_stays(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for run in range(2):
        job = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(run)], cwd=ROOT, env=environment())
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("step-????????")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3) + (1.5 if run else 0))
        job.send_signal(signal.SIGKILL)
        job.wait()
        path = Snapshots(tmp_path, 0, 1).latest()
        assert path is not None
        step = json.loads((path / "manifest.json").read_text())["step"]
        read(tmp_path, states(ONE, step), ALL[0])

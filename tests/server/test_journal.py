"""The journal: its file under all kinds of damage, and what becomes of requests when the server or their clients end."""

import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import socket
import sqlite3
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from engine.protocol import Fatal, Turn
from errors import UserError
from scripts.lib.process_tree import process_tree
from server import journal as journals
from server import journal_file, resume
from server.errors import ApiError
from server.journal import Journal, Promise
from server.journal_file import HEADER, JournalBounds, JournalFile, Row, check_journal, open_journal
from server.metrics import Metrics
from server.resume import Accepted, Resumer
from server.service import Service
from tests import MODELS, ROOT
from tests.simulation.journal import MemoryFile, SteppedJournal
from tests.support.server_process import ServerProcess, wait_until
from tests.support.server_thread import STORY, Asked, Site, raw_request, wait_for

SECTOR = 512  # bytes


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk of a busy machine changes nothing."""
    monkeypatch.setattr(journals, "COMMIT_SECONDS", 300.0)
    monkeypatch.setattr(journals, "CLOSE_SECONDS", 300.0)


# --- the file --------------------------------------------------------------------------------------------------------------


def some_row(number: int) -> Row:
    name = "".join(random.choices(string.ascii_letters, k=random.randint(1, 60)))
    data = random.randbytes(random.choice([0, 10, 300, 1000, 3000, 6000]))
    return Row(number, time.time(), f"key {number % 3}", f"cmpl-{number}", name, random.choice([0, 200, 503]), data)


def read_all(file: JournalFile) -> dict[int, Row]:
    return {row.number: row for row in file._rows("")}


@pytest.fixture
def journal(tmp_path: Path) -> tuple[Path, dict[int, Row]]:
    """The path of a file that its server has closed, and its rows."""
    path = tmp_path / "journal"
    file, _ = open_journal(path, JournalBounds())
    rows = {n: some_row(n) for n in range(1, 31)}
    with file.transaction():
        for row in rows.values():
            assert file.add(row)
        for number in range(2, 31, 3):
            file.forget(number)
            del rows[number]
    assert read_all(file) == rows
    file.close()
    return path, rows


def opened_again(path: Path, rows: dict[int, Row]) -> int | None:
    """Open a file that may be damaged. It has rows as they were written and no others, and can be written. Returns their number;
    None if the file was refused, in one line and without a change."""
    before = path.read_bytes()
    try:
        file, message = open_journal(path, JournalBounds())
    except UserError as e:
        refusal = str(e)
        assert before[:HEADER] == path.read_bytes()[:HEADER]
        assert "\n" not in refusal and str(path) in refusal and "give another file" in refusal
        return None
    found = read_all(file)
    assert found.items() <= rows.items()
    new = some_row(1000)
    with file.transaction():
        assert file.add(new)
    assert file.find(new.owner, new.answer_id) == new and file.find("another", new.answer_id) is None
    file.close()
    aside = path.with_name(path.name + ".damaged-1")
    assert (str(aside) in message) == aside.exists()
    return len(found)


def test_a_file_that_is_cut_off(
    journal: tuple[Path, dict[int, Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After any number of sectors, of which a run tries some. What can be read before is used."""
    path, rows = journal
    whole = path.read_bytes()
    sizes, found = range(0, len(whole) + 1, SECTOR), dict[int, int | None]()
    most = sizes[len(sizes) * 9 // 10]
    for size in {*random.sample(sizes, 40), *sizes[:3], most, sizes[-1]}:
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "journal").write_bytes(whole[:size])
        found[size] = opened_again(folder / "journal", rows)
        shutil.rmtree(folder)
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    check_journal(str(tmp_path / "cut"), JournalBounds())
    assert "the damaged file is" in capsys.readouterr().err
    # how much of a part is used depends on where SQLite put the table's first page
    assert None not in found.values() and found[sizes[-1]] == len(rows) and (found[most] or 0) > 3, found


def test_what_is_behind_a_damaged_part_is_used(tmp_path: Path) -> None:
    """Also if the part had more requests than are looked for one by one."""
    path = tmp_path / "journal"
    file, _ = open_journal(path, JournalBounds())
    with file.transaction():
        for number in range(1, 4001):
            file._write(Row(number, time.time(), "owner", f"cmpl-{number}", "", 200, b""))
    file.close()
    data = bytearray(path.read_bytes())
    tenth = len(data) // 10 // 4096 * 4096
    data[4 * tenth : 6 * tenth] = bytes(2 * tenth)
    path.write_bytes(data)
    file, message = open_journal(path, JournalBounds())
    found = sorted(read_all(file))
    file.close()
    assert f"{len(found)} requests" in message and found[0] == 1 and found[-1] == 4000
    assert max(b - a for a, b in pairwise(found)) > journal_file.MOST_MISSING


def test_a_schema_that_is_no_text(journal: tuple[Path, dict[int, Row]]) -> None:
    """SQLite quotes it in its error, which Python then cannot read as UTF-8."""
    path, rows = journal
    data = path.read_bytes()
    at = data.index(b"CREATE TABLE ") + len(b"CREATE ")
    path.write_bytes(data[:at] + b"\xb8\xff" + data[at + 2 :])
    assert opened_again(path, rows) is not None


@pytest.mark.parametrize("what", ["the file", "its log"])
def test_a_file_that_is_overwritten(what: str, journal: tuple[Path, dict[int, Row]], tmp_path: Path) -> None:
    path, rows = journal
    if what == "its log":
        file, _ = open_journal(path, JournalBounds())
        with file.transaction():
            for number in range(41, 61):
                rows[number] = some_row(number)
                file.add(rows[number])
        copies = [path.read_bytes(), path.with_name("journal-wal").read_bytes()]  # as after kill -9
        file.close()
    else:
        copies = [path.read_bytes(), b""]
    for i in range(60):
        folder = tmp_path / str(i)
        folder.mkdir()
        harmed = [bytearray(copy) for copy in copies]
        target = harmed[what == "its log"]
        for _ in range(random.choice([1, 1, 5])):
            at, length = random.randrange(len(target)), random.choice([1, 4, 100, SECTOR, 4096])
            target[at : at + length] = random.choice([random.randbytes(length), bytes(length)])[: len(target) - at]
        for suffix, data in zip(("", "-wal"), harmed, strict=True):
            if data:
                (folder / f"journal{suffix}").write_bytes(data)
        opened_again(folder / "journal", rows)
        shutil.rmtree(folder)


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "LOCK_SECONDS", 0.1)
    path = tmp_path / "journal"
    file, _ = open_journal(path, JournalBounds())
    refused(path, "another running server uses it")
    file.close()
    data = bytearray(path.read_bytes())
    data[60:64] = (7).to_bytes(4)
    path.write_bytes(data)
    refused(path, "is of version 7, and this server writes version 1")
    path.write_text("precious")
    refused(path, "is no journal")
    assert path.read_text() == "precious"
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE precious (x)")
    refused(path, "is no journal")
    refused(tmp_path / "no" / "folder", "No such file")
    refused(tmp_path, "is no regular file")
    with pytest.raises(UserError, match="--journal has an empty name; give a file"):
        check_journal("", JournalBounds())
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "is no regular file")


NOBODY = 65534  # a user for whom modes count, unlike for root


def said_to_nobody(path: Path) -> str:
    """What `check_journal` says in a process of another user; empty if it says nothing."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(PermissionError):  # this is no root, and modes count already
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            check_journal(str(path), JournalBounds())
        except BaseException as e:
            os.write(write, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text


def test_files_that_cannot_be_written(journal: tuple[Path, dict[int, Row]]) -> None:
    """A folder or a file that is read-only is refused in one line. Nothing of the file is lost, and it can be used again."""
    path, rows = journal
    with tempfile.TemporaryDirectory() as name:  # tmp_path is in a folder that only this user may enter
        folder = Path(name)
        there = folder / "journal"
        shutil.copy(path, there)
        owners = [folder, there]
        if os.getuid() == 0:
            [os.chown(one, NOBODY, NOBODY) for one in owners]
        assert said_to_nobody(there) == ""
        new, why = folder / "new", "it cannot be written; make the file and its folder writable, or give another file"
        for one, mode, asked, reason in (
            (folder, 0o500, there, why),
            (folder, 0o500, new, "Permission denied; give another file"),
            (there, 0o400, there, why),
        ):
            before = one.stat().st_mode
            one.chmod(mode)
            assert said_to_nobody(asked) == f"UserError: --journal {asked} cannot be used: {reason}"
            one.chmod(before)
        assert sorted(os.listdir(folder)) == ["journal"]
        file, message = open_journal(there, JournalBounds())
        assert (read_all(file), message) == (rows, "")
        file.close()


def test_a_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No new file can be made. The message is SQLite's code for a full disk, which a limit of pages has, too."""
    connected = journal_file._connected
    monkeypatch.setattr(journal_file, "_connected", lambda path, *s: connected(path, *s, "max_page_count = 2"))
    refused(tmp_path / "journal", "the disk is full; free some space")
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    open_journal(tmp_path / "journal", JournalBounds())[0].close()


FULL_DISK = """
import os, sys, time
from pathlib import Path
from server.journal_file import *
folder = Path(sys.argv[1])
open_journal(folder / "old", JournalBounds())[0].close()
file, _ = open_journal(folder / "old", JournalBounds())
with file.transaction():
    file.add(Row(7, time.time(), "owner", "answer", "request", 0, b"x" * 1000))
file.close()
with open(folder / "rest", "wb", buffering=0) as rest:
    try:
        while rest.write(bytes(512)):
            pass
    except OSError:
        pass
for name in ("old", "new"):
    try:
        check_journal(str(folder / name), JournalBounds())
        file, _ = open_journal(folder / name, JournalBounds())
        print(name, [row.number for row in file._rows("")])
        file.close()
    except UserError as e:
        print(name, e)
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A real one, of 256 KiB: what the file has is used, and a new file is refused."""
    spaces = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=256k none "$0"'
    if (
        shutil.which("unshare") is None
        or subprocess.run([*spaces, "sh", "-c", mount, tmp_path], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount")
    command = [*spaces, "sh", "-c", f'{mount} && exec "$1" -c "$2" "$0"', str(tmp_path), sys.executable, FULL_DISK]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [
        "old [7]",
        f"new --journal {tmp_path}/new cannot be used: the disk is full; free some space, or give a file on another disk",
    ]


def test_what_is_there_stays(tmp_path: Path) -> None:
    """A link leads to the new file, only its owner may read it, and the log of a file that was emptied is kept."""
    path, link = tmp_path / "journal", tmp_path / "link"
    link.symlink_to(path)
    file, message = open_journal(link, JournalBounds())
    assert link.is_symlink() and path.stat().st_size and not message
    with file.transaction():
        assert file.add(some_row(1))
    log = (tmp_path / "journal-wal").read_bytes()
    file.close()
    path.chmod(0o644)
    open_journal(path, JournalBounds())[0].close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    (tmp_path / "journal-wal").write_bytes(log[:100])
    file, message = open_journal(path, JournalBounds())
    file.close()
    assert str(aside := tmp_path / "journal.damaged-1") in message and not aside.stat().st_size
    assert (tmp_path / "journal.damaged-1-wal").read_bytes() == log[:100]
    assert (tmp_path / "journal.damaged-1-wal").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def killed(tmp_path: Path) -> tuple[bytes, bytes, dict[int, Row]]:
    """A file and its log as a killed server leaves them, and the rows, one a transaction. Behind the frames of the log are older
    ones."""
    path, rows = tmp_path / "killed", dict[int, Row]()
    file, _ = open_journal(path, JournalBounds())
    for number in range(1, 31):
        rows[number] = some_row(number)
        with file.transaction():
            file.add(rows[number])
    file._db.execute("PRAGMA wal_checkpoint")
    for number in range(1, 6):
        with file.transaction():
            file.forget(number)
            del rows[number]
    copies = path.read_bytes(), path.with_name("killed-wal").read_bytes()
    file.close()
    return *copies, rows


def test_a_transaction_outlives_the_machine(killed: tuple[bytes, bytes, dict[int, Row]], tmp_path: Path) -> None:
    """Each is on the disk when it is committed, and only its owner may read a log that an earlier server left."""
    data, log, _ = killed
    paths = [tmp_path / "journal", tmp_path / "journal-wal"]
    for path, content in zip(paths, (data, log), strict=True):
        path.write_bytes(content)
        path.chmod(0o644)
    file, _ = open_journal(paths[0], JournalBounds())
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    settings = ("journal_mode", "synchronous", "locking_mode")
    assert [file._db.execute(f"PRAGMA {name}").fetchone()[0] for name in settings] == ["wal", 2, "exclusive"]
    file.close()


def opened_with_log(folder: Path, data: bytes, log: bytes) -> tuple[dict[int, Row], str]:
    folder.mkdir()
    (folder / "journal").write_bytes(data)
    (folder / "journal-wal").write_bytes(log)
    file, message = open_journal(folder / "journal", JournalBounds())
    found = read_all(file)
    file.close()
    assert "\n" not in message and not (folder / "journal.part").exists()
    return found, message


def test_a_log_without_its_file(tmp_path: Path) -> None:
    """Whatever is left of the file's header, all requests in the log are used, and both are kept."""
    path, rows = tmp_path / "journal", {n: some_row(n) for n in range(1, 31)}
    file, _ = open_journal(path, JournalBounds())
    for row in rows.values():
        with file.transaction():
            file.add(row)
    data, log = path.read_bytes(), (tmp_path / "journal-wal").read_bytes()
    file.close()
    for size in (0, 1, 15, 16, 50, 71, 72, HEADER, 4096):
        folder = tmp_path / str(size)
        found, message = opened_with_log(folder, data[:size], log)
        assert found == rows
        if size < 72:
            assert f"30 requests and results could be read and are used; the damaged file is {folder}" in message
            assert (folder / "journal.damaged-1").read_bytes() == data[:size]
            assert (folder / "journal.damaged-1-wal").read_bytes() == log


def test_a_log_that_is_damaged_is_said_and_kept(killed: tuple[bytes, bytes, dict[int, Row]], tmp_path: Path) -> None:
    """One changed byte of its header or of a frame that counts, or a cut that leaves no whole transaction."""
    data, log, rows = killed
    assert opened_with_log(tmp_path / "whole", data, log) == (rows, "")
    assert opened_with_log(tmp_path / "begun", data, log[:32])[1] == ""
    frames = [log[at + 8 : at + 16] == log[16:24] for at in range(32, len(log), 4120)]
    last = max(i for i, new in enumerate(frames) if new)
    assert last < len(frames) - 1
    flips = [*range(32), *(32 + random.randrange(last + 1) * 4120 + at for at in (*range(24), 24, 2000, 4119))]
    for i, at in enumerate(flips):
        harmed = log[:at] + bytes([log[at] ^ random.randint(1, 255)]) + log[at + 1 :]
        folder = tmp_path / f"flip-{i}"
        _, message = opened_with_log(folder, data, harmed)
        if (at - 32) // 4120 == last and 8 <= (at - 32) % 4120 < 16:
            continue  # the last frame's salt: nothing tells it from an older one
        kept = [one for one in folder.iterdir() if one.name.startswith("journal.damaged") and one.read_bytes() == harmed]
        assert len(kept) == 1 and str(folder / "journal.damaged-1") in message, (at, message)
    for i, cut in enumerate(random.randrange(33, 32 + last * 4120) for _ in range(20)):
        _, message = opened_with_log(tmp_path / f"cut-{i}", data, log[:cut])
        assert "journal.damaged-1" in message or (cut - 32) % 4120 == 0


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        open_journal(path, JournalBounds())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_stays_within_its_bounds(tmp_path: Path) -> None:
    """The oldest results go first, requests stay, and what is too large is not taken."""
    path = tmp_path / "journal"
    bounds = JournalBounds(bytes=1 << 20, results=50, seconds=3600)
    file, _ = open_journal(path, bounds)
    now = time.time()
    with file.transaction():
        for number in range(1, 100):
            row = Row(number, now - (4000 if number < 10 else 0), "key", f"cmpl-{number}", "", 0, random.randbytes(20_000))
            assert file.add(row)
            assert number in (30, 60) or file.finish(number, 200, random.randbytes(20_000))
        assert not file.add(Row(1000, now, "key", "cmpl-1000", "", 0, bytes(1 << 20)))
    left = sorted(read_all(file))
    assert {30, 60} <= set(left) and left[2:] == list(range(99 - len(left) + 3, 100)) and 20 < len(left) <= 50
    file.close()
    assert path.stat().st_size <= 1 << 20
    file, _ = open_journal(path, JournalBounds(results=10))
    assert file.begin() == ([(30, "key"), (60, "key")], 100)
    assert sorted(read_all(file)) == [30, 60, *range(92, 100)]
    file.close()


def test_owners_do_not_displace_each_other(tmp_path: Path) -> None:
    """Where room is needed, results of the owner that has most are removed first, and none if that makes no room. One owner's
    requests take at most half of the file."""
    file, _ = open_journal(tmp_path / "journal", JournalBounds(bytes=2 << 20, results=40))
    row = lambda number, owner, size=100: Row(number, time.time(), owner, f"cmpl-{number}", "", 0, bytes(size))  # noqa: E731
    with file.transaction():
        for number in range(1, 200):
            owner = "few" if number <= 3 else "many"
            assert file.add(row(number, owner)) and file.finish(number, 200, bytes(10_000))
        assert {1, 2, 3} < set(before := read_all(file)) and len(before) == 40
        added = [file.add(row(number, "greedy", 200_000)) for number in range(200, 210)]
        assert 4 < sum(added) < 6 and {1, 2, 3} < set(read_all(file)) and file.add(row(300, "few"))
    file.close()


def bounded(**bounds: Any) -> JournalFile:
    """A file in memory."""
    file = MemoryFile()
    file._bounds = JournalBounds(**bounds)
    return file


def request(number: int, owner: str = "a", size: int = 10, age: float = 0.0) -> Row:
    return Row(number, time.time() - age, owner, f"cmpl-{number}", "", 0, bytes(size))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("held", "new", "taken"),
    [
        ([("a", 10)] * 4, ("a", 10), True),
        ([("a", 10)] * 5, ("a", 10), False),  # half of the 10 requests
        ([("a", 10)] * 5, ("b", 10), True),
        ([("a", MIB // 4)], ("a", MIB // 4), True),
        ([("a", MIB // 4)], ("a", MIB // 4 + 1), False),  # more than a quarter of the bytes
        ([("a", MIB // 4)] * 2, ("a", 1), False),  # half of them
        ([("a", MIB // 4)] * 2 + [("b", MIB // 5)] * 2, ("c", MIB // 8), False),  # all unfinished ones leave no room
        ([], ("a", MIB // 4 + 1), False),
    ],
)
def test_which_requests_have_room(held: list[tuple[str, int]], new: tuple[str, int], taken: bool) -> None:
    """For one that has none, nothing is removed."""
    file = bounded(bytes=MIB, results=10)
    with file.transaction():
        assert file.add(request(1, "r")) and file.finish(1, 200, b"result")
        for number, (owner, size) in enumerate(held, 2):
            assert file.add(request(number, owner, size))
        before = read_all(file)
        assert file.add(request(100, *new)) == taken
        assert {**before, 100: None}.keys() == {*read_all(file), 100}


def test_the_first_result_counts_and_one_without_room_ends_its_request() -> None:
    file = bounded(bytes=MIB, results=10)
    with file.transaction():
        assert file.add(request(1)) and file.add(request(2))
        assert file.finish(1, 200, b"first") and not file.finish(1, 500, b"second")
        assert not file.finish(2, 200, bytes(MIB // 4 + 1)) and not file.finish(3, 200, b"")
    assert {number: (row.status, row.data) for number, row in read_all(file).items()} == {1: (200, b"first")}


def test_what_is_too_old_goes() -> None:
    """Results at any time, requests when a server starts: nobody waits for their answers any more."""
    file = bounded(seconds=100.0)
    with file.transaction():
        for number, age in ((1, 200.0), (2, 200.0), (3, 0.0), (4, 0.0)):
            assert file.add(request(number, age=age))
            assert number % 2 or file.finish(number, 200, b"")
        file.prune()
    assert sorted(read_all(file)) == [1, 3, 4]
    assert file.begin() == ([(3, "a")], 5) and sorted(read_all(file)) == [3, 4]


def test_the_results_of_who_has_most_rows_go() -> None:
    """As many as there are too many, also after a transaction that failed."""
    file = bounded(results=10)
    with file.transaction():
        for number in range(1, 11):
            assert file.add(request(number, "few" if number <= 3 else "many"))
            assert file.finish(number, 200, bytes(1000 if number <= 3 else 10))
    with contextlib.suppress(RuntimeError), file.transaction():
        file.forget(1)
        file.forget(2)
        raise RuntimeError
    with file.transaction():
        assert file.add(request(11, "new")) and file.add(request(12, "new"))
    assert sorted(read_all(file)) == [1, 2, 3, *range(6, 13)]


def test_an_id_is_that_of_the_newest_request() -> None:
    file = bounded()
    with file.transaction():
        for number, owner, answer, name in ((1, "a", "x", "n"), (2, "a", "y", "n"), (3, "b", "z", "n")):
            assert file.add(Row(number, time.time(), owner, answer, name, 0, b""))
    found = [file.find(*what) for what in (("a", "n"), ("a", "x"), ("b", "n"), ("b", "x"), ("a", ""))]
    assert [row and row.number for row in found] == [2, 1, 3, None, None]


class Life:
    """A journal without a thread."""

    def __init__(self) -> None:
        self.journal = SteppedJournal(MemoryFile())

    def promise(self) -> Promise:
        kept = self.journal.promise("owner", "answer", "request", b"request", True)
        with kept.given():
            self.journal.step()
        return kept

    def status(self) -> int:
        self.journal.step()
        row = self.journal._file.read(1)
        assert row is not None
        return row.status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError(503, "", None, "overloaded"), 0),
        (ApiError(429, "", None, "queue_full"), 0),
        (ApiError(503, "", None, "draining"), 0),
        (ApiError(503, "", None, "engine_failed"), 0),
        (ApiError(503, "", None, "timeout"), 503),
        (ApiError(400, ""), 400),
        (ValueError(), 500),
    ],
)
def test_errors_of_resumed_requests(error: Exception, status: int) -> None:
    """Whatever cannot be run again has a result, and what has no room now is not lost."""
    life = Life()
    promise = life.promise()
    with pytest.raises(type(error)), Promise(life.journal, 1).given():
        raise error
    assert life.status() == status
    promise.finish(200, b"too late")
    assert life.status() == (status or 200)


def test_resumed_requests_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before a request runs is its result, too, unless it only has to wait."""
    life, resumer = Life(), object.__new__(Resumer)
    life.promise()
    errors = iter(
        [ApiError(503, "", None, "overloaded"), ApiError(429, ""), ApiError(503, "", None, "loading"), RuntimeError("no")]
    )

    async def fail(accepted: Accepted) -> None:
        assert life.status() == 0
        raise next(errors)

    monkeypatch.setattr(resume, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(resumer, "_again", fail)
    data = msgspec.msgpack.encode(Accepted("", "", "", 0, b"", [], "", 0, Turn("", 1, 0)))
    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(resumer._answer(data, Promise(life.journal, 1)))
    assert life.status() == 500


@pytest.mark.parametrize("room", [1, 3])
def test_resumed_requests_take_turns_between_owners(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """One owner's thousand requests do not make another's wait until they have ended."""
    settings, counter = SimpleNamespace(max_num_seqs=room), SimpleNamespace(inc=lambda: None)
    resumer = Resumer(cast(Any, SimpleNamespace(settings=settings, metrics=SimpleNamespace(resumed=counter))))
    order, running = list[int](), 0

    async def finish(number: int) -> None:
        nonlocal running
        running += 1
        assert running <= room
        order.append(number)
        await asyncio.sleep(0)
        running -= 1

    async def run() -> None:
        for number in range(100):
            resumer._add(number, "many")
        resumer._add(100, "one")
        resumer._add(101, "another")
        while len(order) < 102:
            await asyncio.sleep(0)

    monkeypatch.setattr(resumer, "_finish", finish)
    asyncio.run(run())
    assert sorted(order) == list(range(102)) and [one for one in order if one < 100] == list(range(100))
    assert max(order.index(100), order.index(101)) <= room + 2


def test_a_resumed_request_starts_for_the_owner_of_whom_fewest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four places: two go to an owner whose requests last, and the other two to one whose requests end at once."""
    settings, counter = SimpleNamespace(max_num_seqs=4), SimpleNamespace(inc=lambda: None)
    resumer = Resumer(cast(Any, SimpleNamespace(settings=settings, metrics=SimpleNamespace(resumed=counter))))
    begun, end = Counter[str](), asyncio.Event()

    async def finish(number: int) -> None:
        begun["lasting" if number < 50 else "short"] += 1
        if number < 50:
            await end.wait()

    async def run() -> None:
        for number in range(50):
            resumer._add(50 + number, "short")
            resumer._add(number, "lasting")
        while begun["short"] < 50:
            await asyncio.sleep(0)
            assert begun["lasting"] <= 2 and resumer._running.total() == len(resumer._tasks)
        end.set()
        while sum(begun.values()) < 100 or resumer._tasks:
            await asyncio.sleep(0)
        assert not resumer._running and not resumer._waiting

    monkeypatch.setattr(resumer, "_finish", finish)
    asyncio.run(run())


def test_a_new_frontend_does_not_end_the_server(tmp_path: Path) -> None:
    """If the ranks serve, it goes on without a damaged journal."""
    path = tmp_path / "journal"
    path.write_text("damaged")
    service: Any = object.__new__(Service)
    service.settings = SimpleNamespace(journal=str(path), journal_bounds=JournalBounds())
    service.client, service.metrics = SimpleNamespace(attach=True), None
    assert service._open_journal() is None
    service.client.attach = False
    with pytest.raises(UserError, match="is no journal"):
        service._open_journal()


def test_results_that_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written even if new requests are not, and beyond a bound become errors."""
    monkeypatch.setattr(journals, "MOST_PENDING", 10_000)
    monkeypatch.setattr(journals, "MOST_ENDS", 40_000)
    for size, status in ((20_000, 200), (35_000, 503), (50_000, 503)):  # beside 11,000
        life = Life()
        promise = life.promise()
        life.journal.write(lambda file: None, 11_000)
        refused = life.journal.ask(lambda file: True, 1)
        promise.finish(200, bytes(size))
        assert refused.result(0) is False and life.status() == status
    life = Life()
    for _ in range(10):  # of a few bytes each
        life.journal.write(lambda file: None)
    assert life.journal.ask(lambda file: True, 1).result(0) is False
    assert life.journal._put(journals._Job(lambda file: None, reads=True, future=cast(Any, Future()))), "reads always wait"


def test_the_newest_results_are_tried_again() -> None:
    jobs = [journals._Job(lambda file: None, size) for size in (50 << 20, 60 << 20, 1 << 20, 2 << 20)]
    assert journals._newest(jobs) == jobs[1:] and journals._newest(jobs[:2]) == jobs[1:2] and journals._newest([]) == []


def test_what_cannot_be_written_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each time that the disk becomes full. A request whose client has left meanwhile delays no other."""
    life = Life()
    file = cast(MemoryFile, life.journal._file)
    for number in (1, 2):
        kept = life.promise()
        file.full = True
        left, told = (life.journal.ask(lambda file: True, 0) for _ in range(2))
        left.cancel()
        kept.finish(200, b"result")
        life.journal.step()
        assert told.result(0) is False
        file.full = False
        life.journal.step()
        row = file.read(number)
        assert row and row.data == b"result", "the next attempt"
        assert [caplog.text.count(words) for words in ("cannot be written (disk full)", "can be written again")] == [number] * 2


def test_a_disk_that_hangs_delays_a_request_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "COMMIT_SECONDS", 0.0)
    life = Life()
    kept = life.journal.promise("owner", "answer", "request", b"request", True)

    async def wait() -> None:
        kept._future = asyncio.get_running_loop().create_future()
        await kept.written()

    asyncio.run(wait())
    assert life.journal.metrics.unjournaled._value.get() == 1


def test_the_thread_tries_again_and_writes_all_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(journals, "IDLE_SECONDS", 3600.0)
    begun, go, tries = threading.Event(), threading.Event(), list[int]()

    def fail_once(file: JournalFile) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise sqlite3.OperationalError("disk full")

    async def run() -> None:
        journal = Journal.open(tmp_path / "journal", JournalBounds(), Metrics("thread"))
        journal.start()
        journal.write(fail_once)
        await asyncio.to_thread(wait_for, lambda: len(tries) == 2)
        journal.write(lambda file: begun.set() or go.wait(60))
        await asyncio.to_thread(begun.wait, 60)
        journal.write(lambda file: file.add(request(1)))
        closing = asyncio.create_task(journal.close())
        await asyncio.sleep(0)
        go.set()
        await closing

    asyncio.run(run())
    file, _ = open_journal(tmp_path / "journal", JournalBounds())
    assert sorted(read_all(file)) == [1]
    file.close()


def test_what_is_left_to_finish(tmp_path: Path) -> None:
    """A request that has a result meanwhile is not computed again, and one that cannot be read is given up."""

    async def run() -> list[Any]:
        journal = Journal.open(tmp_path / "journal", JournalBounds(), Metrics("left"))
        journal.start()
        for number in (1, 2, 3):
            promise = journal.promise("owner", f"cmpl-{number}", "", b"request", True)
            with promise.given():
                await promise.written()
        journal.finish(1, 200, b"result")
        await journal.ask(lambda file: bool(file._db.execute("UPDATE requests SET data = x'00' WHERE number = 2")), 0)
        found = [await journal.load(number) for number in (1, 2, 3)]
        await journal.close()
        return [one and one[0] for one in found]

    assert asyncio.run(run()) == [None, None, b"request"]
    file, _ = open_journal(tmp_path / "journal", JournalBounds())
    assert {number: row.attempts for number, row in read_all(file).items()} == {1: 0, 3: 1}
    assert file.begin()[0] == [(3, "owner")]
    file.close()


def test_what_is_written_no_longer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of many times the bytes that may wait are all written, since each waits for the disk before the next comes."""
    monkeypatch.setattr(journals, "MOST_PENDING", 10_000)
    numbers = range(1, 12)

    async def run() -> float:
        journal = Journal.open(tmp_path / "journal", JournalBounds(), Metrics("written"))
        journal.start()
        for number in numbers:
            promise = journal.promise("owner", f"cmpl-{number}", "", bytes(6_000), True)
            with promise.given():
                await promise.written()
        await journal.close()
        unjournaled: float = journal.metrics.unjournaled._value.get()
        return unjournaled

    assert asyncio.run(run()) == 0
    file, _ = open_journal(tmp_path / "journal", JournalBounds())
    assert sorted(read_all(file)) == [*numbers]
    file.close()


def test_a_request_that_ends_every_server_is_refused_at_last(tmp_path: Path) -> None:
    """Each server that begins it counts as an attempt. The last attempt is followed by an error, which is the result."""

    async def attempt() -> tuple[bytes, Promise] | None:
        journal = Journal.open(tmp_path / "journal", JournalBounds(), Metrics("attempts"))
        journal.start()
        if not journal.unfinished:
            promise = journal.promise("owner", "cmpl-1", "", b"request", True)
            with promise.given():
                await promise.written()
        found = await journal.load(1)
        await journal.close()
        return found

    for _ in range(journal_file.MOST_ATTEMPTS):
        found = asyncio.run(attempt())
        assert found and found[0] == b"request"
    assert asyncio.run(attempt()) is None
    file, _ = open_journal(tmp_path / "journal", JournalBounds())
    row = file.read(1)
    assert row and row.status == 500 and json.loads(row.data)["error"]["code"] == "poisoned"
    file.close()


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("ending", [False, True])
def test_what_a_client_leaves_behind(lasting: bool, ending: bool) -> None:
    """While the server ends, nobody can tell whether the client left by itself: the next server finishes the request."""
    journal, orphans = SteppedJournal(MemoryFile()), list[int]()
    journal.ending, journal.on_orphan = ending, lambda number, owner: orphans.append(number)
    with pytest.raises(asyncio.CancelledError), journal.promise("owner", "answer", "", b"request", lasting).given():
        raise asyncio.CancelledError
    journal.step()
    assert (journal._file.read(1) is not None) == (lasting or ending)
    assert orphans == ([1] if lasting and not ending else [])
    with pytest.raises(asyncio.CancelledError), Promise(journal, 1).given():
        raise asyncio.CancelledError
    assert len(orphans) <= 1, "one that goes on without a client has none that leaves"


# --- requests ----------------------------------------------------------------------------------------------------------------


class Sites:
    """Frontends with the same journal, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[Site]()

    def start(self, **settings: Any) -> Site:
        if self.made:
            self.end()
        folder = self.folder / str(len(self.made))
        folder.mkdir()
        self.made.append(Site(folder, journal=str(self.folder / "journal"), drain_timeout=0.2, **settings))
        return self.made[-1].start()

    def end(self) -> None:
        site = self.made[-1]
        if site.thread.is_alive():
            site.server._loop.call_soon_threadsafe(site.server.drain)
            site.thread.join(60)
        if site.engine.is_alive():
            site.engine.stop()


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.end()


def result(site: Site, name: str, key: str = "one") -> httpx.Response:
    return site.http.get(f"/v1/results/{name}", headers={"authorization": f"Bearer {key}"})


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 100, "logprobs": 2, "echo": True, "temperature": 0.5}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "logprobs": True, "stop": "kind"},
    ),
    ("/v1/completions", {"max_tokens": 7, "stream": True, "prompt": "x" * 20_000, "truncate_prompt_tokens": 9}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Ho"}], "max_tokens": 9, "stream": True}),
]


def test_a_request_outlives_its_server(sites: Sites) -> None:
    """The next server computes the same, and keeps the answer that it would have sent; for the request's own client only. An answer
    that was sent is kept, too."""
    keys = ("one", "two name=b")
    site = sites.start(api_key=keys)
    wanted, ids = [], [f"mine-{i}" for i in range(len(REQUESTS))]
    headers = [as_client("one", name) for name in ids]
    for (path, body), name, header in zip(REQUESTS, ids, headers, strict=True):
        sent = site.http.post(path, json=body, headers=header).text
        wait_for(lambda name=name: result(site, name).status_code == 200)
        wanted.append(result(site, name).json())
        assert body.get("stream") or wanted[-1] == json.loads(sent)
        assert wanted[-1]["id"] in sent
    texts = [json.dumps(one, ensure_ascii=False) for one in wanted]
    assert STORY in texts[0] and 'the café. It was ", ' in texts[1]

    site.engine.hold, before = True, len(site.engine.submits)
    asked = [Asked(site.url + path, body, header) for (path, body), header in zip(REQUESTS, headers, strict=True)]
    wait_for(lambda: all(result(site, name).status_code == 202 for name in ids))
    assert result(site, ids[0]).json()["status"] == "unfinished"
    wait_for(lambda: len(site.engine.submits) == before + 7)
    computed = {json.dumps(s.prompt_ids): s for s in site.engine.submits[before:]}
    (link := sites.folder / "tiny-hybrid").symlink_to(MODELS / "tiny-hybrid")
    site = sites.start(api_key=keys, model=str(link))
    assert {one.join().status for one in asked} == {503} and "its next start finishes the request" in asked[0].text
    for name, one in zip(ids, wanted, strict=True):
        wait_for(lambda name=name: result(site, name).status_code == 200)
        again = result(site, name).json()
        assert {**again, "id": "", "created": 0} == {**one, "id": "", "created": 0}
        assert result(site, again["id"]).json() == again
        assert result(site, one["id"]).json() == one, "the earlier one"
        assert {result(site, found, "two").status_code for found in (name, one["id"])} == {404}
    assert len(site.engine.submits) == 7
    for submit in site.engine.submits:
        old = computed[json.dumps(submit.prompt_ids)]
        assert submit.turn == old.turn and submit.params.max_tokens == old.params.max_tokens
    assert {s.params.seed for s in site.engine.submits} == {s.params.seed for s in sites.made[0].engine.submits[before:]}
    assert 'rung:resumed_requests_total{model_name="tiny-hybrid"} 4.0' in site.http.get("/metrics").text


@pytest.mark.parametrize("store", [True, False])
def test_a_client_that_leaves(sites: Sites, store: bool) -> None:
    """Its request ends with it, unless it asked for the contrary."""
    site = sites.start()
    site.engine.hold = True
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        raw.sendall(raw_request({"prompt": "Hi", "max_tokens": 100, "request_id": "left", "store": store}))
        wait_for(lambda: site.server.client.active and site.http.get("/v1/results/cmpl-left").status_code == 202)
    wait_for(lambda: len(site.engine.aborts) == 1)
    site.engine.hold = False
    status = 200 if store else 404
    wait_for(lambda: site.http.get("/v1/results/cmpl-left").status_code == status)
    if store:
        assert site.http.get("/v1/results/cmpl-left").json()["choices"][0]["text"] == STORY


def test_errors_are_results(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next server cannot run has an error as its result: here because of a shorter context, and another model."""
    site = sites.start()
    assert site.http.post("/v1/completions", json={"prompt": [1000], "request_id": "a"}).status_code == 400
    wait_for(lambda: site.http.get("/v1/results/cmpl-a").status_code == 400)
    site.engine.hold = True
    site.ask(request_id="b")
    wait_for(lambda: site.http.get("/v1/results/cmpl-b").status_code == 202)
    site = sites.start(model=str(MODELS / "tiny-ladder"))
    wait_for(lambda: site.http.get("/v1/results/cmpl-b").status_code == 503)
    result = site.http.get("/v1/results/cmpl-b")
    assert (result.json()["error"]["code"], result.headers["x-should-retry"]) == ("model_changed", "false")
    assert "retry-after" not in result.headers


def test_the_end_of_the_ranks_says_where_the_answer_will_be(sites: Sites) -> None:
    site = sites.start()
    site.engine.hold = True
    asked = site.ask()
    wait_for(lambda: site.engine.submits)
    site.engine.send(Fatal("rank 1 was lost"))
    assert "GET /v1/results/ID" in asked.json()["error"]["message"] and asked.status == 503


def test_a_full_disk_does_not_stop_the_server(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    site = sites.start()
    file = site.server.service.journal
    assert file is not None
    pages = file._file._value("PRAGMA page_count")
    file._file._db.execute(f"PRAGMA max_page_count = {pages}")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert site.complete(max_tokens=5, metadata="x" * 20_000)["usage"]["completion_tokens"] == 5
        metrics = site.http.get("/metrics").text
        assert 'rung:unjournaled_requests_total{model_name="tiny-hybrid"} 3.0' in metrics
        assert caplog.text.count("cannot be written (database or disk is full)") == 1
        file._file._db.execute("PRAGMA max_page_count = 100000")
        answer = site.complete()
        wait_for(lambda: site.http.get(f"/v1/results/{answer['id']}").status_code == 200)
        assert "can be written again" in caplog.text


def test_kills_of_everything(tmp_path: Path) -> None:
    """All processes of a real server are killed while it streams, then the frontend of the next one."""
    flags = ("--model", MODELS / "tiny-hybrid", "--journal", tmp_path / "journal", "--api-key", "one", "--api-key", "two")
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "seed": 5, "temperature": 0.9, "logprobs": 1}
    with ServerProcess(*flags) as server:
        server.ready()
        wanted = server.http.post("/v1/completions", json=body, headers=as_client("one")).json()["choices"]
        ask_and_kill(server, body, "first", process_tree(server.process.pid))
        server.process.wait()
    with ServerProcess(*flags) as server:
        server.ready()
        assert answer(server, "first")["choices"] == wanted
        assert server.http.get("/v1/results/first", headers=as_client("two")).status_code == 404
        ranks = server.rank_pids()
        ask_and_kill(server, body, "second", server.frontend_pids())
        wait_until(lambda: server.health() == 200, 120, "another frontend")
        assert answer(server, "second")["choices"] == wanted
        assert server.rank_pids() == ranks and server.metrics()["rung:recoveries_total"] == 0
        server.process.terminate()
        assert server.wait(120) == 0


def as_client(key: str, request_id: str = "") -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "x-request-id": request_id}


def ask_and_kill(server: ServerProcess, body: dict[str, Any], name: str, pids: Sequence[int]) -> None:
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=as_client("one", name)) as reply:
        text = reply.iter_text()
        next(text)  # the connection lives as long as `text`
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def answer(server: ServerProcess, name: str) -> dict[str, Any]:
    ask = lambda: server.http.get(f"/v1/results/{name}", headers=as_client("one"))  # noqa: E731
    wait_until(lambda: ask().status_code == 200, 120, "the answer")
    found: dict[str, Any] = ask().json()
    return found

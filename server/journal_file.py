"""The file of `--journal`: accepted requests and their results, in SQLite.

A row is a request, and later its result. Each has a digest, because SQLite notices damage to its own structures only. With a
write-ahead log and `synchronous = FULL` a transaction that was committed survives the end of the process and that of the machine.
The file is locked while it is open.
"""

import hashlib
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from cli import note
from errors import UserError

MAGIC, APPLICATION, VERSION = b"SQLite format 3\0", 0x52756E67, 1  # in the file's header
HEADER, IDENTITY = 100, 72  # bytes; MAGIC and APPLICATION are in the first 72
LOCK_SECONDS = 5.0  # a server that ends may hold the file for a moment
MOST_ATTEMPTS = 10  # of servers to finish a request
MOST_MISSING = 500  # rows in a row that are looked for in a damaged file
MOST_SHARE = 0.25  # of the file that a request or result may take
MOST_OWNED = 0.5  # of the file that one owner's unfinished requests may take
PAGE = 4096  # bytes
LOG_BYTES = 16 << 20  # of the write-ahead log, after it was written to the file
LOG_HEADER, FRAME_HEADER = 32, 24  # bytes of the log, and of each frame in front of its page
TABLE = "requests"
FIELDS = "number, time, owner, answer_id, request_id, status, data, attempts, digest"
SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE {TABLE} (
    number INTEGER PRIMARY KEY, time REAL, owner TEXT, answer_id TEXT, request_id TEXT, status INTEGER, attempts INTEGER,
    digest BLOB, data BLOB
);
CREATE INDEX by_answer ON {TABLE} (answer_id);
CREATE INDEX by_request ON {TABLE} (request_id);
CREATE INDEX by_owner ON {TABLE} (owner, status, number, length(data));
CREATE INDEX results ON {TABLE} (number) WHERE status != 0;
CREATE INDEX unfinished ON {TABLE} (owner, length(data)) WHERE status = 0;
"""
NOT_WRITABLE = "it cannot be written; make the file and its folder writable, or give another file"
USELESS = {  # SQLite's primary error codes
    sqlite3.SQLITE_BUSY: "another running server uses it; end that one, or give this one another file",
    sqlite3.SQLITE_READONLY: NOT_WRITABLE,
    sqlite3.SQLITE_PERM: NOT_WRITABLE,
    sqlite3.SQLITE_FULL: "the disk is full; free some space, or give a file on another disk",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened or created; give a file in a folder that exists and is writable",
    sqlite3.SQLITE_IOERR: "the disk cannot be read or written; give a file on another disk",
}


@dataclass(frozen=True)
class Row:
    """An accepted request. `owner`: who may read the result. `status`: of the result; 0: it is unfinished, and `data` is the
    request. `attempts`: of later servers to finish it."""

    number: int
    time: float  # of the acceptance, as time.time()
    owner: str
    answer_id: str
    request_id: str
    status: int
    data: bytes
    attempts: int = 0

    @property
    def digest(self) -> bytes:
        fields = (self.number, self.time, self.owner, self.answer_id, self.request_id, self.status, self.attempts)
        return hashlib.blake2b(repr(fields).encode(errors="replace") + self.data, digest_size=16).digest()


@dataclass(frozen=True)
class JournalBounds:
    """Of what a file keeps: bytes, results, and the age of requests and results in seconds."""

    bytes: int = 1 << 30
    results: int = 10_000
    seconds: float = 86_400.0


class JournalFile:
    """A file that is open. Made by `open_journal`. Methods raise sqlite3.Error; those that write are called in a `transaction`."""

    def __init__(self, db: sqlite3.Connection, bounds: JournalBounds) -> None:
        self._db, self._bounds = db, bounds
        self._count: int | None = None  # of rows; None: not known

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    @property
    def changes(self) -> int:
        """Rows that were written since the file was opened."""
        return self._db.total_changes

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite has rolled back by itself
                self._db.execute("ROLLBACK")
            self._count = None
            raise

    def begin(self) -> tuple[list[tuple[int, str]], int]:
        """Remove what is too old. Returns the unfinished requests as number and owner, and the number of the next new one."""
        with self.transaction():
            self.prune()
            self._db.execute(f"DELETE FROM {TABLE} WHERE time < ?", (time.time() - self._bounds.seconds,))
            self._count = None
            found = list(self._db.execute(f"SELECT number, owner FROM {TABLE} WHERE status = 0 ORDER BY number"))
            (last,) = self._db.execute(f"SELECT max(number) FROM {TABLE}").fetchone()
        return found, (last or 0) + 1

    def add(self, row: Row) -> bool:
        """Add a request. False if there is no room for it, or its owner has too many."""
        size, bounds = len(row.data), self._bounds
        count, owned = self._unfinished("AND owner = ?", row.owner)
        few = count < MOST_OWNED * bounds.results and owned + size <= MOST_OWNED * bounds.bytes
        return few and self._has_room(size) and self._write(row)

    def finish(self, number: int, status: int, result: bytes) -> bool:
        """Replace a request by its result. A result for which there is no room is not kept."""
        row = self.read(number)
        if row is None or row.status:
            return False
        self.forget(number)
        return self._has_room(len(result)) and self._write(replace(row, status=status, data=result))

    def note_attempt(self, number: int) -> bool:
        """Note that a server computes a request of an earlier one."""
        row = self.read(number)
        return row is not None and self._write(replace(row, attempts=row.attempts + 1))

    def forget(self, number: int) -> bool:
        removed = self._db.execute(f"DELETE FROM {TABLE} WHERE number = ?", (number,)).rowcount
        if self._count is not None:
            self._count -= removed
        return True

    def read(self, number: int) -> Row | None:
        """A request or its result; None if it is not here, or damaged."""
        return next(self._rows("WHERE number = ?", number), None)

    def find(self, owner: str, name: str) -> Row | None:
        """The newest one of an owner with this id of its answer or of its HTTP request."""
        # the + keeps SQLite from reading all rows of the owner
        where = "WHERE (answer_id = ? OR request_id = ?) AND +owner = ? ORDER BY number DESC LIMIT 1"
        return next(self._rows(where, name, name, owner), None)

    def prune(self) -> bool:
        """Remove the oldest results until the bounds hold."""
        return self._has_room(0, rows=0)

    def _rows(self, where: str, *values: Any) -> Iterator[Row]:
        """Rows as they were written."""
        for *fields, digest in self._db.execute(f"SELECT {FIELDS} FROM {TABLE} {where}", values):
            row = Row(*fields)
            with suppress(TypeError):  # damaged fields may have any type
                if row.digest == digest:
                    yield row

    def _write(self, row: Row) -> bool:
        self.forget(row.number)
        self._db.execute(f"INSERT INTO {TABLE} ({FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*astuple(row), row.digest))
        if self._count is not None:
            self._count += 1
        return True

    def _has_room(self, size: int, rows: int = 1) -> bool:
        """Remove results that are too old, and then others until there is room for more rows of `size` bytes: the oldest of the
        owner that has most. False, and nothing is removed for it, if the unfinished requests leave no room."""
        count, unfinished = self._unfinished()
        if size > self._bounds.bytes * MOST_SHARE or (
            rows and (unfinished + size > self._bounds.bytes or count + rows > self._bounds.results)
        ):
            return False
        while True:
            if self._count is None:  # counting takes too long to be done for each request
                self._count = self._value(f"SELECT count(*) FROM {TABLE}")
            full = self._used() + size > self._bounds.bytes or self._count + rows > self._bounds.results
            oldest = self._db.execute(f"SELECT number, time FROM {TABLE} WHERE status != 0 ORDER BY number LIMIT 1").fetchone()
            if oldest is None or not (full or oldest[1] < time.time() - self._bounds.seconds):
                return not full
            self.forget(self._oldest_of_most() if full else oldest[0])

    def _unfinished(self, where: str = "", *values: Any) -> tuple[int, int]:
        """The number and bytes of requests without a result."""
        query = f"SELECT count(*), ifnull(sum(length(data)), 0) FROM {TABLE} WHERE status = 0 {where}"
        count, size = self._db.execute(query, values).fetchone()
        return count, size

    def _oldest_of_most(self) -> int:
        """The oldest result of the owner that has the largest part of the file, in bytes and in rows, with its unfinished
        requests. There is a result."""
        part = f"sum(length(data)) / {float(self._bounds.bytes)} + count(*) / {float(self._bounds.results)}"
        oldest = "min(CASE WHEN status != 0 THEN number END) AS oldest"
        return self._value(
            f"SELECT {oldest} FROM {TABLE} GROUP BY owner HAVING oldest IS NOT NULL ORDER BY {part} DESC LIMIT 1"
        )

    def _used(self) -> int:
        return (self._value("PRAGMA page_count") - self._value("PRAGMA freelist_count")) * PAGE

    def _value(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def salvage(self, damaged: sqlite3.Connection) -> int:
        """Copy all rows that can be read of a damaged file. Returns their number."""
        old, found = JournalFile(damaged, self._bounds), set[int]()

        def copy(where: str, *values: int) -> None:
            for row in old._readable(where, *values):
                self._write(row)
                found.add(row.number)

        copy("NOT INDEXED ORDER BY number")
        first = max(found, default=0)
        copy("NOT INDEXED WHERE number > ? ORDER BY number DESC", first)
        number = first + 1
        while number not in found and number <= first + MOST_MISSING:
            copy("NOT INDEXED WHERE number = ?", number)
            if number in found:
                first = number
            number += 1
        return len(found)

    def _readable(self, where: str, *values: int) -> Iterator[Row]:
        """Rows up to the first that cannot be read."""
        with suppress(sqlite3.Error):
            yield from self._rows(where, *values)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns errors of the system and of SQLite into a UserError that says what to do."""
    try:
        yield
    except sqlite3.Error as e:
        raise UserError(f"--journal {path} cannot be used: {USELESS.get(_code(e), str(e))}") from e
    except OSError as e:
        raise UserError(f"--journal {path} cannot be used: {e.strerror}; give another file") from e


def open_journal(path: Path, bounds: JournalBounds) -> tuple[JournalFile, str]:
    """Open a journal, or make a new one. Also returns what to tell the user, if anything. Raises UserError if that is impossible.

    What can be read of a damaged file is copied to a new one. The damaged one gets another name.
    """
    with explained(path):
        path = Path(os.path.realpath(path))
        if os.path.lexists(path) and not path.is_file():
            raise UserError(f"--journal {path} is no regular file; give another file")
        if path.exists() and not os.access(path, os.W_OK):  # SQLite would say that it cannot lock it
            raise sqlite3.OperationalError(NOT_WRITABLE)
        message = ""
        if not _size(path) and not _size(_beside(path, "-wal")):
            _make(path)
            _replace(path)
        elif _is_cut(path):
            message = _mend(path)
        _check_header(path)
        _hide(path)
        try:
            db = _whole(path)
        except sqlite3.Error as e:
            if _code(e) in USELESS:
                raise
            message = _mend(path)
            return JournalFile(_whole(path), bounds), message
        return JournalFile(db, bounds), message or _keep_log(path, db)


def check_journal(path: str | None, bounds: JournalBounds) -> None:
    """Raises UserError if a server could not use this file. Mends a damaged one, and says so."""
    if path == "":
        raise UserError("--journal has an empty name; give a file")
    if path is not None:
        file, message = open_journal(Path(path), bounds)
        file.close()
        if message:
            note(f"warning: {message}")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary one


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hide(path: Path) -> None:
    """Let only the owner read the file."""
    for one in (path, _beside(path, "-wal")):
        with suppress(PermissionError, FileNotFoundError):  # it may belong to another user who lets this one write
            one.chmod(one.stat().st_mode & 0o700)


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(HEADER)
    if not header.startswith(MAGIC) or header[68:IDENTITY] != APPLICATION.to_bytes(4):
        raise UserError(f"--journal {path} is no journal, or its beginning was overwritten; move it away, or give another file")
    if (version := int.from_bytes(header[60:64])) != VERSION:
        what = f"is of version {version}, and this server writes version {VERSION}"
        raise UserError(f"--journal {path} {what}; finish its requests with the server that wrote it, or give another file")


@contextmanager
def _connected(path: Path, *settings: str) -> Iterator[sqlite3.Connection]:
    """A connection, which is closed only after an error."""
    db = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        db.text_factory = lambda data: data.decode(errors="replace")
        for setting in ("locking_mode = EXCLUSIVE", *settings):
            db.execute(f"PRAGMA {setting}")
        yield db
    except UnicodeDecodeError:  # of a message that quotes the file, with which the sqlite3 module cannot make an error
        db.close()
        raise sqlite3.DatabaseError("damaged text") from None
    except BaseException:
        db.close()
        raise


def _whole(path: Path) -> sqlite3.Connection:
    """Open and lock a file. Raises sqlite3.DatabaseError if it is damaged."""
    with _connected(path, "journal_mode = WAL", "synchronous = FULL", f"journal_size_limit = {LOG_BYTES}") as db:
        if (state := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(state)
        db.execute(f"SELECT {FIELDS} FROM {TABLE} LIMIT 1").fetchone()
        db.execute("BEGIN IMMEDIATE")
        db.execute("COMMIT")
    return db


def _make(path: Path, damaged: Path | None = None) -> int:
    """Make a new file beside `path`, with what can be read of a damaged one. Returns how many rows that are."""
    new = _beside(path, ".new")
    with _unless_done(new):
        _write(new, b"")
        with _connected(new, "journal_mode = MEMORY") as db, closing(db):
            db.executescript(f"BEGIN; {SCHEMA} COMMIT")
            if damaged is None:
                return 0
            file = JournalFile(db, JournalBounds())
            # with a writable schema, SQLite also opens files that are too short
            with _connected(damaged, "writable_schema = ON") as old, closing(old), file.transaction():
                return file.salvage(old)


@contextmanager
def _unless_done(path: Path) -> Iterator[None]:
    """Removes a file that cannot be completed, as on a full disk."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(path: Path, data: bytes) -> None:
    """Make a file that only its owner may read: it has prompts and answers."""
    path.unlink(missing_ok=True)
    with _unless_done(path), os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(data)


def _is_cut(path: Path) -> bool:
    """Whether nothing is left of a file but its log, and perhaps a part of its header."""
    if _size(path) >= IDENTITY or not _size(_beside(path, "-wal")):
        return False
    return not path.exists() or MAGIC.startswith(path.read_bytes()[: len(MAGIC)])


def _headed(path: Path) -> Path:
    """A file that has the first page of a new one, and the log of one that was cut."""
    _make(path)
    new, part = _beside(path, ".new"), _beside(path, ".part")
    page = bytearray(new.read_bytes()[:PAGE])
    page[18:20] = 2, 2  # the file has a log
    _write(part, bytes(page))
    _write(_beside(part, "-wal"), _beside(path, "-wal").read_bytes())
    return part


def _mend(path: Path) -> str:
    """Replace a damaged file by a new one with what can be read of it. Returns what to tell the user."""
    aside = _free_name(path)
    log, kept = _beside(path, "-wal"), _beside(aside, "-wal")
    with _unless_done(kept):
        if log.exists():  # SQLite removes it
            _write(kept, log.read_bytes())
        try:
            count = _make(path, _headed(path) if _is_cut(path) else path)
        except sqlite3.Error as e:
            if _code(e) in USELESS:
                raise
            count = _make(path)  # nothing can be read
        finally:
            for suffix in ("", "-wal"):
                _beside(path, f".part{suffix}").unlink(missing_ok=True)
        path.touch(0o600)
        os.link(path, aside)
    _replace(path)
    return f"--journal {path} is damaged: {count} requests and results could be read and are used; the damaged file is {aside}"


def _keep_log(path: Path, db: sqlite3.Connection) -> str:
    """Copy the log if SQLite does not use all of it. Returns what to tell the user, if anything."""
    log = _beside(path, "-wal")
    data = log.read_bytes() if log.exists() else b""
    try:
        _, frames, _ = db.execute("PRAGMA wal_checkpoint").fetchone()
    except sqlite3.Error:  # as on a full disk: a later start will see it
        return ""
    if not _has_more(data, frames):
        return ""
    aside = _free_name(path)
    _write(aside, data)
    return f"--journal {path}: a part of its log {log.name} is damaged or incomplete, and is not used; a copy of it is {aside}"


def _has_more(log: bytes, frames: int) -> bool:
    """Whether a log has more than these frames. Behind them may be older ones, which are in the file already: their salts differ."""
    if not _has_header(log):
        return len(log) > 0
    size = FRAME_HEADER + PAGE
    behind = range(LOG_HEADER + frames * size, len(log), size)
    return any(log[16:24].startswith(log[at + 8 : at + 16]) for at in behind)


def _has_header(log: bytes) -> bool:
    """Whether a log begins with a whole header, which ends with a checksum. SQLite reads nothing behind another one."""
    if len(log) < LOG_HEADER:
        return False
    first = second = 0
    for a, b in struct.iter_unpack(">2I" if log[3] & 1 else "<2I", log[:24]):
        first = (first + a + second) & 0xFFFFFFFF
        second = (second + b + first) & 0xFFFFFFFF
    return struct.pack(">2I", first, second) == log[24:LOG_HEADER]


def _free_name(path: Path) -> Path:
    """A name for something damaged."""
    names = (_beside(path, f".damaged-{i}") for i in range(1, 10_000))
    return next(name for name in names if not name.exists() and not _beside(name, "-wal").exists())


def _replace(path: Path) -> None:
    """Put the new file in the place of `path`."""
    for suffix in ("-wal", "-shm", "-journal"):  # they belong to the file that was there
        _beside(path, suffix).unlink(missing_ok=True)
    os.replace(_beside(path, ".new"), path)
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)

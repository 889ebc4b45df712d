"""Token files: what is written is read, and damaged files are refused."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from errors import UserError
from training.token_file import TokenFile, TokenWriter, open_tokens, write_tokens


def numbered(path: Path, count: int, mask: np.ndarray | None = None, window: int | None = None) -> TokenFile:
    """A file in which token i is i, so that all tokens differ."""
    return write_tokens(path / "tokens.bin", np.arange(count), 2**16 + 1, "none", mask, window)


@pytest.mark.parametrize(("vocab", "bytes_each"), [(1000, 2), (2**16, 2), (2**16 + 1, 4), (128256, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_written_is_read(vocab: int, bytes_each: int, masked: bool, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab, size=1000)
    tokens[0] = vocab - 1
    mask = rng.integers(2, size=1000) if masked else None
    path = tmp_path / "x.bin"
    with TokenWriter(path, vocab, "abc", masked) as writer:
        for piece in np.split(np.arange(1000), [0, 1, 400, 400, 999]):
            writer.append(tokens[piece], None if mask is None else mask[piece])
    found = open_tokens(path, vocab)
    assert path.read_bytes() == tokens.astype(f"<u{bytes_each}").tobytes()
    assert np.array_equal(found.tokens, tokens)
    assert (found.mask is None) if mask is None else np.array_equal(found.mask, mask)
    assert found.header.tokenizer == "abc" and found.header.tokens == 1000 and found.header.vocab_size == vocab


def test_files_are_told_apart_and_an_equal_one_is_not(tmp_path: Path, seed: int) -> None:
    rng, count = np.random.default_rng(seed), 20_000
    tokens = rng.integers(1000, size=count)
    changed, mask = tokens.copy(), np.ones(count)
    changed[rng.integers(count)] ^= 1
    other_mask = mask.copy()
    other_mask[rng.integers(count)] = 0
    (tmp_path / "again").mkdir()
    files = [
        write_tokens(tmp_path / "a.bin", tokens, 1000, "x"),
        write_tokens(tmp_path / "b.bin", changed, 1000, "x"),
        write_tokens(tmp_path / "c.bin", tokens, 1000, "y"),
        write_tokens(tmp_path / "d.bin", tokens, 1000, "x", mask),
        write_tokens(tmp_path / "e.bin", tokens[:-1], 1000, "x"),
        write_tokens(tmp_path / "f.bin", tokens, 1000, "x", other_mask),
    ]
    assert len({file.fingerprint for file in files}) == len(files)
    assert write_tokens(tmp_path / "again" / "a.bin", tokens, 1000, "x").fingerprint == files[0].fingerprint


@pytest.mark.parametrize("masked", [False, True])
def test_a_file_of_an_earlier_version_has_the_fingerprint_of_a_new_one(masked: bool, tmp_path: Path) -> None:
    file = numbered(tmp_path, 20_000, np.arange(20_000) % 2 if masked else None)
    header = tmp_path / "tokens.json"
    known = json.loads(header.read_text())
    header.write_text(json.dumps({key: value for key, value in known.items() if key != "digest"}))
    assert open_tokens(file.path, 2**17).fingerprint == file.fingerprint


@pytest.mark.parametrize("suffix", [".bin", ".mask"])
def test_a_file_that_was_changed_behind_its_header_is_told_apart(suffix: str, tmp_path: Path) -> None:
    file = numbered(tmp_path, 20_000, np.ones(20_000))
    before, path = file.fingerprint, file.path.with_suffix(suffix)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    written = file.path.with_suffix(".json").stat().st_mtime_ns
    os.utime(path, ns=(written + 1, written + 1))  # the clock of a file system may be too coarse for this test
    assert open_tokens(file.path, 2**17).fingerprint != before


@pytest.mark.parametrize("place", [0, -1])
def test_both_ends_of_a_copy_count(place: int, tmp_path: Path) -> None:
    tokens, other = np.arange(20_000), np.arange(20_000)
    other[place] = 7
    first, second = (write_tokens(tmp_path / name, ids, 2**17, "x") for name, ids in (("a.bin", tokens), ("b.bin", other)))
    before = second.fingerprint
    shutil.copy2(first.path, second.path)
    assert open_tokens(second.path, 2**17).fingerprint != before


def test_a_mapped_file_keeps_its_tokens_when_it_is_written_again(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, others = rng.integers(0, 50, 5000), rng.integers(50, 99, 5000)
    mapped = write_tokens(tmp_path / "x.bin", ids, 99, "none")
    with TokenWriter(tmp_path / "x.bin", 99, "none") as writer:
        writer.append(others)
        assert np.array_equal(open_tokens(mapped.path, 99).tokens, ids)  # of the file that is whole
    assert np.array_equal(mapped.tokens, ids) and np.array_equal(open_tokens(mapped.path, 99).tokens, others)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.json"]


def test_an_interrupted_file_is_removed(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TokenWriter(tmp_path / "x.bin", 100, "none", masked=True) as writer:
            writer.append(np.arange(10), np.ones(10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_header_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"x\.bin cannot be written \(No space left on device\)"):
        write_tokens(tmp_path / "x.bin", np.arange(10), 100, "none", np.ones(10))
    assert not list(tmp_path.iterdir())


def damage_header(folder: Path, **changes: object) -> None:
    header = folder / "tokens.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "tokens.json").unlink(), "tokens.json is missing"),
        (lambda d: (d / "tokens.json").write_text("{"), "no header of a token file"),
        (lambda d: (d / "tokens.json").write_bytes(b"\xff\xfe{"), "no header of a token file"),
        (lambda d: (d / "tokens.json").write_text("[1]"), "no header of a token file"),
        (lambda d: damage_header(d, format=2), "format 1"),
        (lambda d: damage_header(d, dtype="int8"), "no valid dtype"),
        (lambda d: damage_header(d, tokens="many"), "no valid dtype and token count"),
        (lambda d: damage_header(d, window=-5), "no valid dtype and token count"),
        (lambda d: damage_header(d, digest=5), "no valid digest"),
        (lambda d: (d / "tokens.bin").unlink(), "tokens.bin cannot be read"),
        (lambda d: (d / "tokens.bin").write_bytes(b"12345"), "5 bytes where its header says 400: it is torn"),
        (lambda d: (d / "tokens.bin").write_bytes(b"1" * 401), "401 bytes where its header says 400: it is torn"),
        (lambda d: (d / "tokens.bin").write_bytes(b"1" * 396), "396 bytes where its header says 400: it is torn"),
        (lambda d: (d / "tokens.mask").write_bytes(b"12345"), "5 bytes where its header says 100: it is torn"),
    ],
)
def test_damaged_files(damage: object, says: str, tmp_path: Path) -> None:
    path = numbered(tmp_path, 100, np.ones(100)).path
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=says):
        open_tokens(path, 2**17)


def test_a_larger_vocabulary_than_the_models(tmp_path: Path) -> None:
    path = numbered(tmp_path, 100).path
    with pytest.raises(UserError, match="ids below 65537, but the model knows 1024; tokenize with the model's own"):
        open_tokens(path, 1024)
    with pytest.raises(UserError, match=r"no token file, whose name ends in \.bin"):
        open_tokens(tmp_path / "tokens.json", 2**17)

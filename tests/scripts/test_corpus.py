"""The synthetic corpus: documents are deterministic, split by key, correct, and can be encoded by the corpus's tokenizer."""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from checkpoints.presets import model_config
from scripts.corpus import documents as corpus
from scripts.corpus import tokens, train_tiny
from scripts.corpus.tokenizer import MAX_LENGTH, load_tokenizer, train_tokenizer
from training.token_file import open_tokens

CHAT_KINDS = [kind for kind in corpus.KINDS if kind != "story"]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(path, sample=4000)
    return path


def pairs(kind: str, count: int, split: str = "train") -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of documents of one kind."""
    return [(d.prompt_messages[-1]["content"], d.answer) for d in corpus.documents(7, count, split, kind)]


# ------------------------------------------------------------------------------------------------ determinism, splits


@pytest.mark.parametrize("kind", [None, *corpus.KINDS])
def test_a_document_depends_only_on_its_number(kind: str | None) -> None:
    whole = list(corpus.documents(3, 40, "train", kind))
    assert whole == list(corpus.documents(3, 40, "train", kind))
    assert whole[25:] == list(corpus.documents(3, 15, "train", kind, start=25))
    assert whole != list(corpus.documents(4, 40, "train", kind))


@pytest.mark.parametrize(("split", "checksum"), [("train", 0x25EC6462), ("heldout", 0x6CFE47F2)])
def test_the_corpus_is_that_of_the_embedded_models(split: str, checksum: int) -> None:
    text = "".join(map(corpus.render, corpus.documents(1, 2000, split)))
    assert zlib.crc32(text.encode()) == checksum, "the held-out documents may now be among those that they were trained on"


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_heldout_and_train_share_no_key(kind: str) -> None:
    train = {document.key for document in corpus.documents(1, 2000, "train", kind)}
    heldout = {document.key for document in corpus.documents(1, 200, "heldout", kind)}
    assert heldout and not train & heldout
    assert all(map(corpus.is_heldout, heldout)) and not any(map(corpus.is_heldout, train))


# ------------------------------------------------------------------------------------------------ exact tasks


def parse_sum(prompt: str) -> tuple[int, str, int] | None:
    """Operands and operation of an arithmetic prompt, in the order of the calculation."""
    if len(numbers := re.findall(r"\d+", prompt)) != 2 or re.match("(Copy|Repeat|Say|Count|How|Sort|Put)", prompt):
        return None
    first, second = map(int, numbers)
    if re.search(r"plus|\+|Add|sum", prompt):
        return first, "+", second
    if re.search("times|x|Multiply|product", prompt):
        return first, "x", second
    return (second, "-", first) if re.match("Subtract|Take", prompt) else (first, "-", second)


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_arithmetic(split: str) -> None:
    for prompt, answer in pairs("arithmetic", 500, split):
        parsed = parse_sum(prompt)
        assert parsed is not None, prompt
        first, operation, second = parsed
        assert answer == str({"+": first + second, "-": first - second, "x": first * second}[operation]), prompt
        assert int(answer) >= 0 and max(first, second) <= (12 if operation == "x" else 99)


# ------------------------------------------------------------------------------------------------ tokenizer


def test_every_byte_round_trips(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    samples = [chr(point) for point in (*range(0x250), 0x20AC, 0x2B50, 0x4E2D, 0xFFFD, 0x1F34E, 0x10FFFF)]
    texts = ["".join(samples), *samples, *map(corpus.render, corpus.documents(1, 200))]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256 and all(tokenizer.token_to_id(letter) is not None for letter in alphabet)


def test_the_token_file_has_the_documents_in_their_order(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "CHUNK", 7)
    tokens.write_corpus(tmp_path / "x.bin", tokenizer_dir, 9, 30 * tokens.TOKENS_PER_DOCUMENT)
    ids = open_tokens(tmp_path / "x.bin", 1024).tokens
    assert ids.dtype == np.uint16
    text = "".join(map(corpus.render, corpus.documents(9, 30)))
    assert load_tokenizer(tokenizer_dir).decode(ids.tolist(), skip_special_tokens=False) == text
    monkeypatch.setattr(tokens, "load_tokenizer", lambda _: pytest.fail("the file is there"))
    tokens.write_corpus(tmp_path / "x.bin", tokenizer_dir, 9, 30 * tokens.TOKENS_PER_DOCUMENT)


def test_every_document_fits_the_context(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    lengths = [len(tokenizer.encode(corpus.render(document)).ids) for document in corpus.documents(1, 1000)]
    assert max(lengths) <= MAX_LENGTH


# ------------------------------------------------------------------------------------------------ chat template


def test_rendering_equals_the_chat_template(tokenizer_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 1024)
    assert tokenizer.encode("apple")[0] == 0 and tokenizer.encode("apple").count(0) == 1
    for kind in CHAT_KINDS:
        for document in corpus.documents(1, 20, kind=kind):
            messages = list(document.messages)
            text = corpus.render(document)
            assert tokenizer.apply_chat_template(messages, tokenize=False) == text
            prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
            assert prompt + document.answer + corpus.END == text
            open_ended = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
            assert open_ended + corpus.END == text
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            assert ids == tokenizer.encode(text, add_special_tokens=False)


# ------------------------------------------------------------------------------------------------ command line


@pytest.mark.long
def test_a_tiny_model_is_trained_and_described(tokenizer_dir: Path, tmp_path: Path, in_turn: Callable[..., Any]) -> None:
    shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    flags = "--variant ladder --tokens 4200 --batch 2 --micro-batch 1 --seed 3 --device cpu --out"
    sparse = in_turn([False, True], 0)
    train_tiny.main([*flags.split(), str(tmp_path), *["--sparse"] * sparse])
    model = tmp_path / ("tiny-moe-ladder" if sparse else "tiny-ladder")
    config = model_config(str(model), None, 1)
    assert config == train_tiny.tiny_config("ladder", sparse) and bool(config.experts) == sparse
    assert config.parameter_count() * 2 < (8e6 if sparse else 6e6), "in 16 bits"
    record = json.loads((model / "training.json").read_text())
    assert record["variant"] == "ladder" and record["ranks"] == 1 and record["seconds"] > 0
    settings = {"steps": 2, "seed": 3, "global_batch": 2, "micro_batch": 1, "learning_rate": 4e-3, "sequence_length": 1024}
    assert record["settings"].items() >= settings.items()
    assert 2000 < record["tokens_in_corpus"] < 8000
    assert 5 < record["loss_every_20_steps"][-1] < 9, "hardly trained on a vocabulary of 1,024 tokens"
    examples = json.loads((model / "examples.json").read_text())
    assert examples == train_tiny.EXAMPLES | {"about": examples["about"]} and f" {3 + sparse} million" in examples["about"]

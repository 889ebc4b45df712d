"""What a checkpoint's files can make endless or enormous ends with a sentence: in `LLM`, in `generate.py`, on ranks."""

import json
import os
import re
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from engine import LLM
from engine.llm import encode_chat, encode_texts
from errors import UserError
from ranks import bounded
from scripts import quantize
from scripts.bench.serving import speculation
from scripts.quality import heldout
from tests import MODELS
from tests.support import server_thread
from tests.support.command_line import Here, launch
from text.tokenizer_files import load_tokenizer
from training import encode

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENORMOUS = "{{ 'a' * 10 ** 11 }}"
HI = [{"role": "user", "content": "hi"}]
CATASTROPHIC = {"type": "Split", "pattern": {"Regex": "(?:x+x+)+y"}, "behavior": "Isolated", "invert": False}


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are soon reached."""
    monkeypatch.setattr(bounded, "SECONDS", 1)
    monkeypatch.setattr(bounded, "MEMORY", 1 << 27)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Copies a model, with other parts of its `tokenizer.json` and another chat template."""

    def copy(template: str | None = None, **parts: Any) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        shutil.copytree(
            MODELS / "tiny-hybrid", folder, ignore=shutil.ignore_patterns("tokenizer.json", "*.jinja"), dirs_exist_ok=True
        )
        content = json.loads((MODELS / "tiny-hybrid" / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**content, **parts}))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return copy


def doubled(times: int) -> dict[str, Any]:
    """A normalizer that makes 2 ** times letters of each `e`."""
    step = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    return {"type": "Sequence", "normalizers": [step] * times}


def test_the_result_and_the_errors_of_a_function_come_back() -> None:
    def fail(error: Exception) -> None:
        raise error

    found = bounded.bounded("it", lambda a, b: (os.getpid(), a + b), 1, b=2)
    assert found[1] == 3 and found[0] != os.getpid()
    with pytest.raises(UserError, match=r"^mend it$"):
        bounded.bounded("it", fail, UserError("mend it"))
    with pytest.raises(RuntimeError, match="KeyError"):
        bounded.bounded("it", fail, KeyError("x"))
    with pytest.raises(UserError, match=r"^it needs more than"):
        bounded.bounded("it", bytes, 1 << 31)
    with pytest.raises(UserError, match=r"^it needs more than"):  # as when a library written in Rust cannot allocate
        bounded.bounded("it", os.abort)


def test_a_caller_does_not_wait_for_a_lock_that_is_never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has a copy of the lock, which a thread of the parent held at the fork."""
    monkeypatch.setattr(bounded, "PATIENCE", 0.2)
    monkeypatch.setattr(bounded, "BUSY", 0.1)
    lock = threading.Lock()
    with lock, pytest.raises(UserError, match=r"^it is not prepared after 0\.3 s"):
        bounded.bounded("it", lock.acquire, timeout=60)


def test_long_results_come_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(bounded.bounded("it", bytes, 5_000_000)) == 5_000_000
    monkeypatch.setattr(bounded, "RESULT", 1000)
    with pytest.raises(UserError, match=r"^it needs more than"):
        bounded.bounded("it", bytes, 1500)
    assert len(bounded.bounded("it", bytes, 2000, characters=1000)) == 2000


def test_a_text_that_is_read_often_has_more_time() -> None:
    def compute() -> str:
        while time.process_time() < 1.2:
            pass
        return "done"

    with pytest.raises(UserError, match="takes more than 1 s"):
        bounded.bounded("it", compute, characters=1000)
    assert bounded.bounded("it", compute, characters=1000, times=200) == "done"


def test_limits_of_the_user_stay() -> None:
    """`ulimit` sets a hard limit, which a process may not raise."""

    def under_a_limit() -> int:
        limit = 1 << 45
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        bounded.limit_memory(1 << 46)
        return resource.getrlimit(resource.RLIMIT_AS)[0]

    assert bounded.bounded("it", under_a_limit) == 1 << 45


def test_a_template_without_an_end_or_a_bound_is_a_user_error(checkpoint: Callable[..., Path]) -> None:
    """Also the short conversations that show what it takes are bounded."""
    tokenizer = load_tokenizer(checkpoint(ENDLESS))
    with pytest.raises(UserError, match="takes more than 1 s of processor time"):
        encode_chat(tokenizer, HI)
    tokenizer.chat_templates["default"] = ENORMOUS
    with pytest.raises(UserError, match="needs more than 128 MiB"):
        encode_chat(tokenizer, HI)
    tokenizer.chat_templates["default"] = "{{ messages[0].content }}"
    assert encode_chat(tokenizer, HI) == tokenizer.encode("hi", False)


def test_a_normalizer_that_multiplies_a_prompt_is_a_user_error(checkpoint: Callable[..., Path]) -> None:
    llm = LLM(checkpoint(normalizer=doubled(34)))
    for prompts in ("e", ["fine", "e"]):
        with pytest.raises(UserError, match=r"the prompt (needs|takes) more than"):
            llm.generate(prompts)
    with pytest.raises(UserError, match=r"the prompt (needs|takes) more than"):
        llm.score("e")
    assert llm.encode("hi") == load_tokenizer(MODELS / "tiny-hybrid").encode("hi")


def test_a_tokenizer_that_multiplies_any_text_is_a_user_error_when_it_is_loaded(checkpoint: Callable[..., Path]) -> None:
    """A decoder, too."""
    steps = doubled(34)["normalizers"]
    every = [{**step, "pattern": {"Regex": "."}} for step in steps]
    with pytest.raises(UserError, match=r"tokenizer\.json (needs|takes) more than"):
        load_tokenizer(checkpoint(normalizer={"type": "Sequence", "normalizers": every}))
    with pytest.raises(UserError, match=r"tokenizer\.json (needs|takes) more than"):
        load_tokenizer(checkpoint(decoder={"type": "Sequence", "decoders": steps}))
    with pytest.raises(UserError, match="characters of a token"):
        load_tokenizer(checkpoint(decoder={"type": "Sequence", "decoders": steps[:17]}))


@pytest.mark.parametrize("text", ["e", "x" * 60])
def test_a_text_that_a_tokenizer_cannot_take_is_refused_by_the_server(
    text: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short texts are tokenized in the event loop, unless the tokenizer may lengthen them."""
    folder = checkpoint(normalizer=doubled(34)) if text == "e" else checkpoint(pre_tokenizer=CATASTROPHIC)
    monkeypatch.setattr(server_thread, "TOKENIZER", load_tokenizer(folder))
    site = server_thread.Site(folder, model=str(folder), worker_seconds=1.0 if text == "e" else 60.0).start()
    try:
        message = site.refused("/v1/completions", {"prompt": text, "max_tokens": 1})["message"]
        assert re.search("to prepare" if text == "e" else "the tokenizers library failed", message), message
        assert site.health() == "ready"
    finally:
        site.close()


def test_special_tokens_are_added_if_asked_for() -> None:
    tokenizer = load_tokenizer(MODELS / "tiny-hybrid")
    plain = tokenizer.encode("hi", False)
    assert encode_texts(tokenizer, ["hi", ""]) == [[tokenizer.bos_id, *plain], [tokenizer.bos_id]]
    assert encode_texts(tokenizer, ["hi", ""], add_special_tokens=False) == [plain, []]


def test_the_command_refuses_a_template_without_a_bound(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(ENORMOUS, normalizer=doubled(34))
    here = Here(monkeypatch, capfd)
    assert "the conversation needs more than" in here.refuses("--model", folder, "--chat", "--prompt", "hi")
    assert "the prompt" in here.refuses("--model", folder, "--prompt", "e")


def test_tokenizing_for_training_refuses_what_has_no_end_or_bound(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chats, texts = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl"
    chats.write_text(json.dumps({"messages": [*HI, {"role": "assistant", "content": "ho"}]}))
    texts.write_text('{"text": "e"}\n' * 3)
    monkeypatch.setattr(encode, "ITEM_BYTES", 16)
    task = encode.Task(checkpoint(ENDLESS), chat=True, window=99)
    with pytest.raises(UserError, match=r"the text of .*chats\.jsonl takes more than 1 s of processor time"):
        list(encode.encode_all(task, encode.work_items([chats], True, tmp_path), 1))
    task = encode.Task(checkpoint(normalizer=doubled(34)), chat=False)
    with pytest.raises(UserError, match=r"the text of .*texts\.jsonl (needs|takes) more than"):
        list(encode.encode_all(task, encode.work_items([texts], False, tmp_path), 2))


def test_scripts_refuse_texts_without_a_bound(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(ENORMOUS, normalizer=doubled(34))
    tokenizer = load_tokenizer(folder)
    for encode_it in (
        lambda: heldout.held_out_stories(tokenizer, 1),
        lambda: heldout.matches(cast(Any, None), tokenizer, "question", 1),
        lambda: quantize.calibration(str(folder), "e", cast(Any, None), 1, 1),
        lambda: speculation.prompts_of("story", tokenizer, 1, 0),
        lambda: speculation.prompts_of("question", tokenizer, 1, 0),
    ):
        with pytest.raises(UserError, match=r"(needs|takes) more than"):
            encode_it()


def test_ranks_refuse_a_template_without_a_bound_once(checkpoint: Callable[..., Path]) -> None:
    done = launch("--model", checkpoint(ENORMOUS), "--chat", "--prompt", "hi", ranks=2)
    assert done.code == 2 and not done.out
    assert re.fullmatch(r"error: the conversation needs more than [^\n]+\n", done.err), done.err


def test_a_panic_is_a_user_error(checkpoint: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(checkpoint(pre_tokenizer=CATASTROPHIC))
    with pytest.raises(UserError, match="the tokenizers library failed"):
        tokenizer.encode("x" * 60)
    with pytest.raises(UserError, match="the tokenizers library failed"):
        encode_chat(tokenizer, [{"role": "user", "content": "x" * 60}])

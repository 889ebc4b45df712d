"""Token files from conversations: the loss mask against the answers' text, packing against its definition, the command."""

import importlib
import json
import random
import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from errors import UserError
from tests import MODELS
from tests.support.command_line import Here
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer
from training import encode, tokenize_data
from training.batches import GlobalBatches
from training.chat_data import best_fit, encode_example, read_messages
from training.token_file import TokenFile, open_tokens

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # renders the last answer differently from earlier ones, as templates of reasoning models do
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STYLES = {  # template, special tokens (the first one begins a text), the token that ends a turn
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "forgetful": (FORGETFUL, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
}
EMBEDDED = MODELS / "tiny-standard"
WORDS = ["the", "fox", "took", "12", "34", "x", "=", "\n\n\n", "", "Ünïcödé", "漢字", "🦊", "Where?", "It's", "here,", "\ttab"]


def write_checkpoint(folder: Path, style: str, template: str | None = None) -> Path:
    """Write a byte-level tokenizer with the template of a style. It merges newlines, as Llama 3's and Qwen's do."""
    standard, special, end = STYLES[style]
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(r"\s*[\r\n]+| ?\S+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["\n\n\n", "\n\n", " ".join(WORDS)] * 9,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet),
    )
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": special[0], "eos_token": end, "chat_template": template or standard}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_sentencepiece(folder: Path) -> Path:
    """Write a sentencepiece model with Llama 2's template. In its tokens a space belongs to the word that follows it."""
    folder.mkdir()
    kept = dict(byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False)
    with (folder / "tokenizer.model").open("wb") as file:
        words = iter([" ".join(WORDS).replace("\n", "")] * 9)
        how = dict(vocab_size=320, model_type="bpe", minloglevel=2, num_threads=1)
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=words, model_writer=file, **how, **kept)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": LLAMA2}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {style: write_checkpoint(base / style, style) for style in STYLES} | {"embedded": EMBEDDED}


def some_text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))).strip() or "nothing"


def some_messages(rng: random.Random, turns: int | None = None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": some_text(rng)}] if rng.random() < 0.5 else []
    for _ in range(turns or rng.randint(1, 4)):
        messages += [{"role": role, "content": some_text(rng)} for role in ("user", "assistant")]
    return messages


def supervised_texts(tokenizer: Tokenizer, ids: Any, mask: Any) -> list[str]:
    """The text of each run of consecutive supervised tokens, with special tokens."""
    runs = groupby(zip(ids, mask, strict=True), lambda one: bool(one[1]))
    return [tokenizer.decode([int(id) for id, _ in run], skip_special_tokens=False) for counted, run in runs if counted]


def end_of_turn(tokenizer: Tokenizer) -> str:
    return tokenizer.token_text(tokenizer.eos_ids[0])


# --- which tokens count --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["chatml", "llama3", "embedded"])
def test_exactly_the_answers_count(style: str, checkpoints: dict[str, Path], seed: int) -> None:
    tokenizer, rng = load_tokenizer(checkpoints[style]), random.Random(seed)
    for _ in range(30):
        messages = some_messages(rng)
        example = encode_example(tokenizer, messages)
        answers = [m["content"] + end_of_turn(tokenizer) for m in messages if m["role"] == "assistant"]
        assert supervised_texts(tokenizer, example.ids, example.mask) == answers
        assert example.ids == tokenizer.encode_chat(messages, add_generation_prompt=False)
        last = encode_example(tokenizer, messages, last_only=True)
        assert last.ids == example.ids and supervised_texts(tokenizer, last.ids, last.mask) == answers[-1:]


@pytest.mark.parametrize("style", ["chatml", "embedded"])
def test_tokens_before_an_answer_are_those_of_serving(style: str, checkpoints: dict[str, Path], seed: int) -> None:
    """Also if an answer begins with newlines, which this tokenizer would merge with the newlines of the template."""
    tokenizer, rng = load_tokenizer(checkpoints[style]), random.Random(seed)
    for answer in ("\nyes", "\n\nyes", "\n", " yes"):
        messages = [*some_messages(rng, 1), {"role": "user", "content": "why"}, {"role": "assistant", "content": answer}]
        example = encode_example(tokenizer, messages)
        prompt = tokenizer.encode_chat(messages[:-1])
        assert example.ids[: len(prompt)] == prompt and example.mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]
        assert supervised_texts(tokenizer, example.ids, example.mask)[-1] == answer + end_of_turn(tokenizer)
    if style == "chatml":
        whole = tokenizer.encode_chat([*messages[:-1], {"role": "assistant", "content": "\nyes"}], add_generation_prompt=False)
        assert whole[: len(prompt)] != prompt, "this test needs a tokenizer that merges newlines across the border"


def test_sentencepiece_keeps_the_space_before_an_answer(tmp_path: Path, seed: int) -> None:
    tokenizer, rng = load_tokenizer(write_sentencepiece(tmp_path / "llama2")), random.Random(seed)
    for _ in range(10):
        messages = [m for m in some_messages(rng) if m["role"] != "system"]
        example = encode_example(tokenizer, messages)
        assert example.ids == tokenizer.encode_chat(messages, add_generation_prompt=False)
        answers = [f"{m['content']} </s>" for m in messages if m["role"] == "assistant"]
        assert supervised_texts(tokenizer, example.ids, example.mask) == answers  # decoding drops the first space


def test_an_opening_by_the_assistant_is_no_answer() -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    turns = [("assistant", "Welcome."), ("user", "What is 1 + 1?"), ("assistant", "2")]
    example = encode_example(tokenizer, [{"role": role, "content": content} for role, content in turns])
    assert supervised_texts(tokenizer, example.ids, example.mask) == ["2<|end|>"]


def test_a_template_that_rewrites_history(checkpoints: dict[str, Path], seed: int) -> None:
    tokenizer, rng = load_tokenizer(checkpoints["forgetful"]), random.Random(seed)
    messages = some_messages(rng, 3)
    with pytest.raises(UserError, match=r"renders the messages up to .* otherwise .* --last-answer"):
        encode_example(tokenizer, messages)
    example = encode_example(tokenizer, messages, last_only=True)
    answer = "<think>\n\n</think>\n\n" + messages[-1]["content"] + "<|im_end|>"
    assert supervised_texts(tokenizer, example.ids, example.mask) == [answer]


def test_an_answer_that_nothing_ends(tmp_path: Path) -> None:
    endless = CHATML.replace("<|im_end|>", "")
    tokenizer = load_tokenizer(write_checkpoint(tmp_path, "chatml", endless))
    with pytest.raises(UserError, match=r"no token that ends generation \(<\|im_end\|>\)"):
        encode_example(tokenizer, some_messages(random.Random(1)))


def test_infinity_instruct_is_read_as_messages() -> None:
    record = {
        "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]
    }
    roles = ("system", "s"), ("user", "h"), ("assistant", "g")
    assert read_messages(record) == [{"role": role, "content": content} for role, content in roles]


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "a"}, "messages must be a list"),
        ({"messages": []}, "messages must be a list of objects with at least one"),
        ({"messages": ["a"]}, "messages must be a list of objects"),
        ({"conversations": "a"}, "conversations must be a list"),
        ({"messages": [USER, {"role": "robot", "content": "b"}]}, "role 'robot' of a message is unknown"),
        ({"messages": [USER, {"content": "b"}]}, "role None of a message is unknown"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "role 'bing' of a message is unknown"),
        ({"messages": [USER, ANSWER | {"content": ""}]}, "an assistant message is empty"),
        ({"messages": [USER]}, "no assistant message that answers another"),
        ({"messages": [ANSWER, USER]}, "no assistant message that answers another"),
    ],
)
def test_unusable_conversations(record: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_messages(record)


# --- packing -------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(capacity=st.integers(1, 40), data=st.data())
def test_best_fit_is_best_fit_decreasing(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    windows = best_fit(lengths, capacity)
    assert sorted(i for window in windows for i in window) == list(range(len(lengths))), "each example once"
    assert all(0 < sum(lengths[i] for i in window) <= capacity for window in windows)
    rooms: list[int] = []  # the definition of best-fit decreasing: search all windows for the one with the least room
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    assert sorted(rooms) == sorted(capacity - sum(lengths[i] for i in window) for window in windows)


# --- the command ---------------------------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Here(monkeypatch, capfd, tokenize_data.main, ()).told


def write_lines(path: Path, records: list[Any]) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def windows_in(file: TokenFile) -> list[tuple[list[int], list[int]]]:
    assert file.header.window is not None and file.mask is not None
    shape = (-1, file.header.window)
    return list(zip(file.tokens.reshape(shape).tolist(), file.mask.reshape(shape).tolist(), strict=True))


def test_packed_windows_hold_whole_conversations(command: Command, tmp_path: Path, seed: int) -> None:
    rng, tokenizer = random.Random(seed), load_tokenizer(EMBEDDED)
    conversations = [some_messages(rng) for _ in range(60)] + [some_messages(rng, 60)]
    data = write_lines(tmp_path / "c.jsonl", [{"messages": m} for m in conversations])
    options = ("--chat", "--sequence-length", 255, "--processes", 1)
    code, said = command("--model", EMBEDDED, "--out", tmp_path / "c.bin", *options, data)
    examples = [encode_example(tokenizer, m) for m in conversations]
    kept = {tuple(e.ids): e.mask for e in examples if len(e.ids) <= 256}
    left_out = sum(len(e.ids) > 256 for e in examples)
    assert code == 0 and f"{left_out} left out, 0 truncated" in said, said
    file, end = open_tokens(tmp_path / "c.bin", 1024), tokenizer.eos_ids[0]
    found = set()
    for ids, mask in windows_in(file):
        starts = [i for i, id in enumerate(ids) if id == tokenizer.bos_id]
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            example = ids[start:stop]
            while stop == len(ids) and example[-2:] == [end, end]:
                example.pop()  # padding
            assert mask[start : start + len(example)] == kept[tuple(example)]
            assert not any(mask[start + len(example) : stop])
            found.add(tuple(example))
    assert found == set(kept)
    batches = GlobalBatches(file, 255, 1, 0)
    counted = sum(sum(e.mask) for e in examples if len(e.ids) <= 256)
    assert sum(batches.supervised(step) for step in range(batches.windows)) == counted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.json", "c.jsonl", "c.mask", "c.tokenizer"], (
        "no spool"
    )


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
def test_longer_conversations(too_long: str, command: Command, tmp_path: Path, seed: int) -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    short, long = ([USER, {"role": "assistant", "content": "b" * n}] for n in (3, 90))
    endless_question = [{"role": "user", "content": "a" * 300}, ANSWER]
    data = write_lines(tmp_path / "c.jsonl", [{"messages": m} for m in (long, short, endless_question)])
    options = ("--chat", "--sequence-length", 31, "--too-long", too_long, "--processes", 1)
    code, said = command("--model", EMBEDDED, "--out", tmp_path / "c.bin", *options, data)
    assert code == 0 and ("1 left out, 1 truncated" if too_long == "truncate" else "2 left out, 0 truncated") in said, said
    texts = [supervised_texts(tokenizer, *window) for window in windows_in(open_tokens(tmp_path / "c.bin", 1024))]
    cut = encode_example(tokenizer, long)
    cut_text = supervised_texts(tokenizer, cut.ids[:32], cut.mask[:32])
    assert sorted(texts) == sorted([["bbb<|end|>"]] + ([cut_text] if too_long == "truncate" else []))


def test_processes_change_nothing(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    data = write_lines(
        tmp_path / "c.jsonl", [{"messages": some_messages(rng)} if rng.random() < 0.9 else "" for _ in range(50)]
    )
    monkeypatch.setattr(encode, "ITEM_BYTES", 997)
    found = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.bin"
        code, said = command(
            "--model", EMBEDDED, "--out", out, "--chat", "--sequence-length", 300, data, "--processes", processes
        )  # fmt: skip
        assert code == 0, said
        found.append([out.with_suffix(suffix).read_bytes() for suffix in (".bin", ".mask", ".json")])
    assert found[0] == found[1]


def test_a_document_has_one_end(seed: int) -> None:
    """Also if the tokenizer itself adds one."""
    for ids in ([5, 6], [5, 6, 1]):
        tokenizer = SimpleNamespace(eos_ids=(1, 2), encode=lambda text, parse_special, ids=ids: [*ids])
        assert encode.document(cast(Any, tokenizer), "text").ids == [5, 6, 1]


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_conversation_has_time_for_each_of_its_answers(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is rendered twice for each of them. A document is read once."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] if key == "conversations" else [USER, ANSWER]
    data = write_lines(tmp_path / "c.jsonl", [{key: turns}, {key: turns * 3}])
    given: list[Any] = []
    monkeypatch.setattr(encode, "bounded", lambda *_, characters, times: given.append((characters, times)))
    for chat in (True, False):
        encode.encode_item(encode.Task(EMBEDDED, chat), cast(Any, None), encode.work_items([data], chat, tmp_path)[0])
    assert given == [(data.stat().st_size, 6), (data.stat().st_size, 1)]


def test_documents_lie_one_after_the_other(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """For every size of the items that the file is cut into, also within a line. Special tokens in a text stay text."""
    rng, tokenizer = random.Random(seed), load_tokenizer(EMBEDDED)
    texts = [some_text(rng) + rng.choice(["", "<|end|> no end", "\n\nmore"]) for _ in range(10)]
    write_lines(tmp_path / "b.jsonl", [{"text": text} for text in texts[:5]] + [""])
    (tmp_path / "b.jsonl").write_text((tmp_path / "b.jsonl").read_text().rstrip("\n"))  # no newline at the end
    for i, text in enumerate(texts[5:]):
        (tmp_path / f"c{i:02}.txt").write_text(text)
    expected = [
        id
        for text in texts
        for id in [tokenizer.bos_id, *tokenizer.encode(text, False, parse_special=False), tokenizer.eos_ids[0]]
    ]
    assert expected.count(tokenizer.eos_ids[0]) == 10
    for size in (1, rng.randint(2, 300), 10**6):
        monkeypatch.setattr(encode, "ITEM_BYTES", size)
        code, said = command("--model", EMBEDDED, "--out", tmp_path / "t.bin", tmp_path, "--processes", 1, "--force")
        assert code == 0 and "10 documents" in said, said
        file = open_tokens(tmp_path / "t.bin", 1024)
        assert file.tokens.tolist() == expected and file.mask is None and file.header.window is None


@pytest.mark.parametrize(
    ("lines", "chat", "says"),
    [
        (['{"text": "a"}', "", '{"text": "b"'], False, "d.jsonl, line 3: this is no JSON"),
        (['{"text": "a"}', "[1]"], False, "d.jsonl, line 2: this is no JSON object"),
        (['{"messages": []}'], False, "d.jsonl, line 1: there is no .text.; for conversations .* add --chat"),
        (['{"text": " "}'], False, "d.jsonl, line 1: the document is empty"),
        (["", ""], False, "the inputs hold no document"),
        ([json.dumps({"messages": [USER, ANSWER]})] * 9 + ['{"messages": [{"role": "x"}]}'], True, "line 10: role 'x'"),
        ([json.dumps({"messages": [USER, ANSWER], "tools": 3})], True, "line 1: tools must be a list"),
        ([json.dumps({"messages": [USER, ANSWER | {"content": "b" * 100}]})], True, "all 1 are longer than --sequence-length"),
    ],
)
def test_errors_name_file_and_line(
    lines: list[str], chat: bool, says: str, in_turn: Any, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "ITEM_BYTES", in_turn((20, 10**6), len(says)))
    data, options = write_lines(tmp_path / "d.jsonl", lines), ["--chat", "--sequence-length", "20"] if chat else []
    code, said = command("--model", EMBEDDED, "--out", tmp_path / "t.bin", data, *options, "--processes", 1)
    errors = [line for line in said.splitlines() if "error:" in line]
    assert code == 2 and len(errors) == 1, said
    assert re.search(says, errors[0])
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"], "nothing half-written is left"


def test_errors_of_the_command_line(command: Command, tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    data = write_lines(tmp_path / "d.jsonl", [{"messages": [USER, ANSWER]}])
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Käse".encode("latin-1"))
    (tmp_path / "old.bin").touch()
    bare = write_checkpoint(tmp_path / "bare", "chatml")
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    out, model, chat = ("--out", tmp_path / "t.bin"), ("--model", EMBEDDED), ("--chat", "--sequence-length", 20)
    cases: list[tuple[tuple[object, ...], str]] = [
        ((*model, *out, tmp_path / "nothing"), "is no file and no folder with .jsonl, .txt, .parquet files"),
        ((*model, *out, EMBEDDED / "config.json"), "is of no kind that is read here"),
        ((*model, *out, *chat, latin), "give .jsonl or .parquet files"),
        ((*model, *out, latin), "latin.txt: this is no UTF-8 text"),
        ((*model, "--out", tmp_path / "old.bin", data), "overwrite it with --force"),
        ((*model, "--out", tmp_path / "no" / "t.bin", data), "there is no folder"),
        ((*model, "--out", tmp_path / "t.txt", latin), "must end in .bin"),
        ((*model, *out, "--chat", data), "--chat and --sequence-length go together"),
        ((*model, *out, "--chat", "--sequence-length", 0, data), "--sequence-length must be at least 1"),
        (("--model", tmp_path / "nothing", *out, data), "is no directory; name a checkpoint"),
        (("--model", tmp_path, *out, *chat, data), "no tokenizer at"),
        (("--model", bare, *out, *chat, data), "line 1: the checkpoint has no chat template"),
    ]
    for arguments, says in cases:
        code, said = command(*arguments, "--processes", 1)
        assert code == 2 and says in said and said.count("error:") == 1, (arguments, said)


class Parquet:
    """Stands for pyarrow's file where that is not installed; the files of the test then have JSON lines."""

    def __init__(self, path: Path) -> None:
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def iter_batches(self, size: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(to_pylist=lambda at=at: self.rows[at : at + size]) for at in range(0, len(self.rows), size)]


@pytest.mark.parametrize("chat", [False, True])
def test_tables_are_read_like_lines(
    chat: bool, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A table has null where a row has no key, and other columns, some of which JSON cannot hold."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [{"text": some_text(rng) or "a"} for _ in range(rng.randint(1500, 3000))]
    if chat:
        rows = [{"messages": [USER, ANSWER | {"content": rng.choice("abc")}], "tools": [{"a": 1}]} for _ in rows[:40]]
        tables = [
            {"messages": [{**one, "tool_calls": None} for one in row["messages"]], "tools": [{"a": 1, "b": None}]}
            for row in rows
        ]
    else:
        tables = [{**row, "messages": None, "when": 3} for row in rows]
    asked: list[Any] = []

    def load_dataset(*names: object, **options: object) -> Any:
        asked.append((names, options))
        return ({**row, "image": b""} for row in tables)

    (folder := tmp_path / "in").mkdir()
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        table = importlib.import_module("pyarrow").Table.from_pylist([{**row, "image": b"x"} for row in tables])
        parquet.write_table(table, folder / "a.parquet", row_group_size=700)
    except ImportError:
        monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=Parquet))
        write_lines(folder / "a.parquet", tables)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    options = ["--processes", 1, "--force", *(["--chat", "--sequence-length", 99] if chat else [])]
    made = []
    for inputs in ([lines, lines, lines, lines], ["org/name@v1:part", folder / "a.parquet", folder, "org/name"]):
        code, said = command("--model", EMBEDDED, "--out", folder / "t.bin", *inputs, *options)
        assert code == 0 and "Traceback" not in said, said
        made.append((folder / "t.bin").read_bytes())
    assert made[0] == made[1]
    streamed = {"split": "train", "streaming": True}
    assert asked == [
        (("org/name", "part"), {**streamed, "revision": "v1"}),
        (("org/name", None), {**streamed, "revision": None}),
    ]
    assert {path.name for path in folder.iterdir()} <= {"a.parquet", "t.bin", "t.json", "t.mask", "t.tokenizer"}


def test_tables_that_cannot_be_read(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, out = tmp_path / "a.parquet", ("--model", EMBEDDED, "--out", tmp_path / "t.bin")
    table.write_text("none")
    for name, source in (("pyarrow", table), ("datasets", "org/name")):
        for module in (name, f"{name}.parquet"):
            monkeypatch.setitem(sys.modules, module, None)
        code, said = command(*out, source, "--processes", 1)
        assert code == 2 and f"error: {source} needs {name}; pip install it, or give .jsonl" in said, said
    broken = SimpleNamespace(load_dataset=lambda *names, **options: [{"text": b"bytes"}])
    for rows, why in ((broken, "not JSON serializable"), (SimpleNamespace(), "has no attribute")):
        monkeypatch.setitem(sys.modules, "datasets", rows)
        code, said = command(*out, "org/name", "--processes", 1)
        assert code == 2 and "error: org/name cannot be read as a table with text or messages (" in said and why in said, said
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *names, **options: [{"text": "a"}, {"text": None}])
    )
    code, said = command(*out, "org/name", "--processes", 1)
    assert code == 2 and 'name.jsonl, line 2: there is no "text"' in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("chat", [[], ["--chat", "--sequence-length", 20]])
def test_no_token_file_without_its_tokenizer(
    chat: list[object], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenize_data, "copy_tokenizer", full)
    data = write_lines(tmp_path / "d.jsonl", [{"messages": [USER, ANSWER], "text": "a"}])
    code, said = command("--model", EMBEDDED, "--out", tmp_path / "t.bin", data, *chat, "--processes", 1)
    assert code == 2 and "t.tokenizer cannot be written (No space left on device)" in said and "Traceback" not in said
    assert not list(tmp_path.glob("t.[bjm]*"))

"""The synthetic corpus: documents are deterministic, split by key, correct, and can be encoded by the corpus's tokenizer."""

import dataclasses
import json
import random
import re
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

import cli
from checkpoints.presets import model_config
from errors import UserError
from scripts.corpus import documents as corpus
from scripts.corpus import stories, tokens, train_tiny, words
from scripts.corpus.__main__ import main
from scripts.corpus.plots import PLOTS
from scripts.corpus.tokenizer import CHAT_TEMPLATE, MAX_LENGTH, load_tokenizer, train_tokenizer
from scripts.corpus.train_tiny import seconds_of
from tests import ROOT
from tests.support import quick_start
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


@pytest.mark.parametrize(("split", "checksum"), [("train", 0xB3B0768E), ("heldout", 0xD9E52511)])
def test_the_corpus_is_that_of_the_embedded_models(split: str, checksum: int) -> None:
    text = "".join(map(corpus.render, corpus.documents(1, 500, split)))
    assert zlib.crc32(text.encode()) == checksum, "the held-out documents may now be among those that they were trained on"


def test_documents_do_not_depend_on_the_process() -> None:
    command = [sys.executable, "-m", "scripts.corpus", "--seed", "5", "--documents", "30", "--json"]
    done = quick_start.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    keys = [json.loads(line)["key"] for line in done.stdout.splitlines()]
    assert keys == [document.key for document in corpus.documents(5, 30)]


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_heldout_and_train_share_no_key(kind: str) -> None:
    train = {document.key for document in corpus.documents(1, 2000, "train", kind)}
    heldout = {document.key for document in corpus.documents(1, 200, "heldout", kind)}
    assert heldout and not train & heldout
    assert all(map(corpus.is_heldout, heldout)) and not any(map(corpus.is_heldout, train))


def test_every_sum_of_a_dialogue_is_in_its_split() -> None:
    for split in corpus.SPLITS:
        for document in corpus.documents(2, 300, split, "dialogue"):
            for message in document.messages:
                if message["role"] == "user" and (sums := parse_sum(message["content"])):
                    first, operation, second = sums
                    key = f"arithmetic:{min(first, second)}{operation}{max(first, second)}"
                    assert corpus.is_heldout(key) == (split == "heldout")


def test_one_key_in_sixteen_is_held_out() -> None:
    keys = [f"arithmetic:{low}{sign}{high}" for sign in "+-" for high in range(100) for low in range(high + 1)]
    assert 0.05 < sum(map(corpus.is_heldout, keys)) / len(keys) < 0.075


def test_the_mixture_is_what_the_table_says() -> None:
    assert sum(corpus.MIXTURE.values()) == pytest.approx(1)
    kinds = [document.kind for document in corpus.documents(1, 4000)]
    for kind, share in corpus.MIXTURE.items():
        assert kinds.count(kind) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("flags", [{"split": "test"}, {"kind": "poem"}, {"count": -1}, {"start": -1}])
def test_bad_arguments_are_refused_at_the_call(flags: dict[str, object]) -> None:
    with pytest.raises(UserError):
        corpus.documents(**{"seed": 1, "count": 1, **flags})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_sorting(split: str) -> None:
    for prompt, answer in pairs("sorting", 300, split):
        instruction, listed = prompt.split(": ")
        entries = listed.split(", ")
        backwards = bool(re.search("largest to smallest|descending|reverse", instruction))
        ordered = sorted(entries, key=int if entries[0].isdigit() else str, reverse=backwards)
        assert answer == ", ".join(ordered) and 3 <= len(entries) <= 6


def test_counting() -> None:
    for prompt, answer in pairs("counting", 300):
        instruction, listed = prompt.split(": ")
        entries = listed.split(", ")
        target = re.search(r"(?:does|often) (\S+) appear", instruction)
        expected = sum(entry == target[1] for entry in entries) if target else len(entries)
        assert answer == str(expected) and len(entries) <= 9


def test_copying() -> None:
    times = {"two times": 2, "twice": 2, "three times": 3, "four times": 4}
    for prompt, answer in pairs("copying", 300):
        if said := re.fullmatch(r"Say (.*?) (two times|twice|three times|four times)\.", prompt):
            assert answer == " ".join([said[1]] * times[said[2]])
        else:
            assert answer == prompt.split(": ")[1]


def test_dialogues_remember_the_name() -> None:
    for document in corpus.documents(1, 200, kind="dialogue"):
        if document.prompt_messages[-1]["content"].endswith(" name?"):
            assert document.answer in document.messages[0]["content"]


def test_a_requested_story_has_what_was_asked_for() -> None:
    for prompt, story in pairs("request", 200):
        asked = re.search(r"(?:about|with) an? (.+) and an? ([^.?]+)", prompt)
        assert asked and f" {asked[1]} named " in story and asked[2] in story


# ------------------------------------------------------------------------------------------------ stories, questions


def test_stories_are_well_formed() -> None:
    for document in corpus.documents(1, 500, kind="story"):
        text = document.text or ""
        assert 40 <= len(text.split()) <= 220, text
        assert not re.search(r"[{}]|None|\ba [aeiou]|\ban [^aeiou]|  | [.,]", text), text
        for sentence in re.split(r"(?<=[.!?])[ \n]", text):
            assert not re.match("[a-z]", sentence) or re.match("[a-z]+ (called|said|asked|cried)", sentence), text


def test_every_branch_of_every_plot_can_be_told() -> None:
    for plot in PLOTS:
        for seed in range(60):
            rng = random.Random(seed)
            text, world = stories.tell_story(rng, stories.draw_cast(rng), seed % 2 == 0, [plot])
            assert text and world.questions()


def test_answers_occur_in_their_story() -> None:
    for prompt, answer in pairs("question", 1000):
        story, question = prompt.split("\n")
        assert (answer.split()[-1] if question.startswith("What ") else answer) in story, (prompt, answer)


def test_the_last_taker_has_the_item() -> None:
    checked = 0
    for prompt, answer in pairs("question", 2000):
        story, question = prompt.split("\n")
        if not (asked := re.match("Who has the (.+) (?:now|at the end)", question)):
            continue
        item = re.escape(asked[1])
        taken = rf"(?:gave|handed|lent) (?:(\w+) the {item}|the {item} (?:back )?to (\w+))"
        last = [s for s in re.split(r"(?<=[.!?]) ", story) if re.search(rf" (?:{item}|it)\b", s)][-1]
        takers = [name for found in re.findall(taken, last) for name in found if name[:1].isupper()]
        if len(takers) == 1:
            assert takers[0] == answer, prompt
            checked += 1
    assert checked > 100


def test_colours_and_animals_can_be_read_off() -> None:
    for prompt, answer in pairs("question", 1500):
        story, question = prompt.split("\n")
        if asked := re.match("(?:What|Which) colour is the (.+)[?]", question):
            assert set(re.findall(rf"an? (\w+) {re.escape(asked[1])}\b", story)) & set(words.COLOURS) == {answer}
        elif asked := re.match(r"What (?:kind of )?animal is (\w+)", question):
            assert re.findall(rf"(\w+) named {asked[1]}", story) == [answer.split()[1]]


def test_another_world_has_another_answer() -> None:
    compared = 0
    for seed in range(200):
        cast = stories.draw_cast(random.Random(seed))
        one, two = cast.roles["hero"], cast.roles["friend"]
        swapped = dataclasses.replace(cast, roles={**cast.roles, "hero": two, "friend": one})
        facts = dict(stories.tell_story(random.Random(seed), cast, short=True)[1].questions())
        others = dict(stories.tell_story(random.Random(seed), swapped, short=True)[1].questions())
        for question in [q for q in facts if q[0] in ("holder", "owner", "found", "lost")]:
            trade = {one.name: two.name, two.name: one.name}
            assert others[question] == trade.get(facts[question], facts[question])
            compared += others[question] != facts[question]
    assert compared > 200


def test_impossible_actions_are_refused() -> None:
    world = stories.World(stories.draw_cast(random.Random(1)))
    world.act("own", "hero", "item")
    with pytest.raises(ValueError, match="does not hold"):
        world.act("give", "friend", "hero", "item")
    with pytest.raises(ValueError, match="does not lie"):
        world.act("find", "friend", "item")


# ------------------------------------------------------------------------------------------------ tokenizer


def test_vocabulary(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    assert tokenizer.get_vocab_size() == 1024
    assert [tokenizer.token_to_id(token) for token in corpus.SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.encode("27").tokens == ["<|begin|>", "2", "7"]


def test_every_byte_round_trips(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    samples = [chr(point) for point in (*range(0x250), 0x20AC, 0x2B50, 0x4E2D, 0xFFFD, 0x1F34E, 0x10FFFF)]
    texts = ["".join(samples), *samples, *map(corpus.render, corpus.documents(1, 200))]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256 and all(tokenizer.token_to_id(letter) is not None for letter in alphabet)


def test_some_tokens_split_a_character(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    used = {i for document in corpus.documents(1, 300) for i in tokenizer.encode(corpus.render(document)).ids}
    assert any("\ufffd" in tokenizer.decode([i]) for i in used)


def test_training_is_deterministic(tokenizer_dir: Path, tmp_path: Path) -> None:
    train_tokenizer(tmp_path, sample=4000)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (tokenizer_dir / file.name).read_bytes()


def test_too_small_samples_and_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="raise --sample"):
        train_tokenizer(tmp_path, sample=2)
    with pytest.raises(UserError, match="need 261"):
        train_tokenizer(tmp_path, vocab_size=260)


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


def test_template_of_unusual_messages() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
        },
        {"role": "tool", "content": "  kept  "},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "function", "content": ""},
    ]
    rendered = template.render(messages=messages, tools=[{"name": "add"}], add_generation_prompt=True)
    assert rendered == (
        '<|begin|><|system|>You may call these tools: [{"name": "add"}]<|end|><|system|>ab<|end|><|user|>  kept  <|end|>'
        "<|assistant|><|end|><|assistant|><|end|><|user|><|end|><|assistant|>"
    )


# ------------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize("flags", ["--kind poem", "--split test", "--documents many", "--documents -1", "--colour",
                                   "--tokenizer /dev/null/no", "--out no/such/folder/file"])  # fmt: skip
def test_bad_flags_give_one_line_and_exit_code_2(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["corpus", *flags.split()])
    with pytest.raises(SystemExit) as left:
        cli.run(main)
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_command_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "corpus.txt"
    flags = "--kind arithmetic --documents 5 --split heldout --out"
    monkeypatch.setattr(sys, "argv", ["corpus", *flags.split(), str(out)])
    main()
    expected = [corpus.render(document) for document in corpus.documents(1, 5, "heldout", "arithmetic")]
    assert out.read_text(encoding="utf-8").splitlines() == expected


def test_the_seconds_of_a_resumed_run_include_those_before() -> None:
    lines = [{"step": 20, "step_ms": 50.0}, {"step": 30, "step_ms": 100.0}, {"step": 50, "step_ms": 10.0}]
    assert seconds_of(lines) == pytest.approx(1.0 + 1.0 + 0.2)
    assert seconds_of([]) == 0


@pytest.mark.long
def test_a_tiny_model_is_trained_and_described(tokenizer_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    flags = "--variant ladder --tokens 4200 --batch 2 --micro-batch 1 --seed 3 --device cpu --out"
    train_tiny.main([*flags.split(), str(tmp_path)])
    model = tmp_path / "tiny-ladder"
    config = model_config(str(model), None, 1)
    assert config == train_tiny.tiny_config("ladder")
    record = json.loads((model / "training.json").read_text())
    assert record["variant"] == "ladder" and record["ranks"] == 1 and record["seconds"] > 0
    settings = {"steps": 2, "seed": 3, "global_batch": 2, "micro_batch": 1, "learning_rate": 4e-3, "sequence_length": 1024}
    assert record["settings"].items() >= settings.items()
    assert 2000 < record["tokens_in_corpus"] < 8000
    assert 5 < record["loss_every_20_steps"][-1] < 9, "hardly trained on a vocabulary of 1,024 tokens"
    assert json.loads((model / "examples.json").read_text()) == train_tiny.EXAMPLES

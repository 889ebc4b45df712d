"""Every kind of tokenizer against its own library and against transformers, on small tokenizers trained here."""

import base64
import io
import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.grammars import Grammars
from errors import UserError
from server.logprobs import text_offsets
from text.tokenizer import IncrementalDetokenizer, Tokenizer, check_fits
from text.tokenizer_files import load_tokenizer
from text.tokenizer_formats import LLAMA3_PATTERN

WORDS = "the quick brown fox jumps over a lazy dog and then some more words about éclair naïve Grüße 日本 привет 12 345"
LINES = [" ".join(WORDS.split()[(i * 7 + j * j) % 22] for j in range(10)) + "." for i in range(300)]
TEXTS = [
    "",
    " ",
    "the fox",
    "  two spaces,  and   more ",
    "line\n\n\nbreaks\t and\r\n tabs",
    "naïve 日本 привет 🦊👩‍👩‍👧 e\u0301 ﬁ Ⅳ",
    "it's 12345 o'CLOCK don't",
    "\x00 \u200b \ufffd ▁ <0x41>",
    "x" * 300,
]
KINDS = ["sp-bpe", "sp-unigram", "sp-bare", "tiktoken", "json-bytes", "json-llama", "json-metaspace"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date is defined %}{%- set date = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date + "\\n" + system }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if documents %}{% for d in documents %}{{ d.title }}: {{ d | tojson }}{% endfor %}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{% endfor %}"""
CHAT = [
    {"role": "user", "content": " Grüße & <b>日本</b> "},
    {"role": "assistant", "content": "Hello there. "},
    {"role": "user", "content": "And\n  now?"},
]


# --------------------------------------------------------------------------------------------- training the tokenizers


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def train_sentencepiece(folder: Path, **options: Any) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, minloglevel=2, num_threads=1, **options
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def train_bytes(special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_of(character: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    hidden = [*range(33), *range(127, 161), 173]
    return ord(character) if ord(character) < 0x100 else hidden[ord(character) - 0x100]


def write_tiktoken(folder: Path) -> dict[bytes, int]:
    """Write a file like Llama 3's: the 256 bytes, then merges of a trained byte-level BPE. Return the rank of each token."""
    vocab = train_bytes([]).get_vocab()
    tokens = [bytes(map(byte_of, token)) for token in sorted(vocab, key=vocab.__getitem__)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return ranks


def write_json_bytes(folder: Path) -> None:
    tokenizer = train_bytes(["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool> 日", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": {"__type": "AddedToken", "content": "<|begin|>", "special": True},
            "eos_token": "<|im_end|>",
            "chat_template": CHATML,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def write_json_sentencepiece(folder: Path, metaspace: bool) -> None:
    """Write a tokenizer.json like Llama 2's (`Prepend`, `ByteFallback`, `Strip`), or one with the `Metaspace` pair."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    if not metaspace:
        content = json.loads(tokenizer.to_str())
        vocab = content["model"]["vocab"]
        for byte in range(256):
            vocab[f"<0x{byte:02X}>"] = len(vocab)
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(
        folder / "tokenizer_config.json", {**names, "chat_template": MISTRAL, "tokenizer_class": "PreTrainedTokenizerFast"}
    )


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    llama = {"byte_fallback": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    train_sentencepiece(paths["sp-bpe"], model_type="bpe", vocab_size=420, control_symbols=["[INST]", "[/INST]"], **llama)
    train_sentencepiece(paths["sp-unigram"], model_type="unigram", vocab_size=320, byte_fallback=True)
    train_sentencepiece(paths["sp-bare"], model_type="bpe", vocab_size=420, add_dummy_prefix=False, **llama)
    write_tiktoken(paths["tiktoken"])
    write_json(paths["tiktoken"] / "tokenizer_config.json", {"chat_template": LLAMA3})
    write_json_bytes(paths["json-bytes"])
    write_json_sentencepiece(paths["json-llama"], metaspace=False)
    write_json_sentencepiece(paths["json-metaspace"], metaspace=True)
    return paths


@pytest.fixture(scope="session")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="session")
def hf(folders: dict[str, Path]) -> dict[str, Any]:
    """transformers' tokenizers, loaded from the same folders."""
    kinds = ["json-bytes", "json-llama", "json-metaspace"]
    return {kind: transformers.AutoTokenizer.from_pretrained(folders[kind]) for kind in kinds}


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies a tokenizer's folder, so that a test can change it."""
    return lambda kind: shutil.copytree(folders[kind], tmp_path / kind)


def reference_encode(folder: Path) -> tiktoken.Encoding:
    lines = (folder / "tokenizer.model").read_text().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    return tiktoken.Encoding("reference", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})


# ------------------------------------------------------------------------------------------------- encode and decode


@pytest.mark.parametrize("kind", ["sp-bpe", "sp-unigram", "sp-bare"])
@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_is_the_library(kind: str, text: str, folders: Any, loaded: Any) -> None:
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folders[kind] / "tokenizer.model"))
    ids = loaded[kind].encode(text)
    assert ids == [sp.bos_id(), *sp.encode(text)]
    assert loaded[kind].decode(ids) == sp.decode(ids)
    if kind != "sp-unigram" and "▁" not in text:  # a normalizer loses text, and so does a literal ▁, the sign for a space
        assert loaded[kind].decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_tiktoken_is_the_library(text: str, folders: Any, loaded: Any) -> None:
    reference = reference_encode(folders["tiktoken"])
    tokenizer = loaded["tiktoken"]
    assert tokenizer.encode(text) == [tokenizer.bos_id, *reference.encode(text, disallowed_special=())]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["json-bytes", "json-llama", "json-metaspace"])
@pytest.mark.parametrize("text", [*TEXTS, "<s>[INST] hi [/INST]", "a<|im_end|>\n<tool> 日 b"])
def test_json_is_transformers(kind: str, text: str, loaded: Any, hf: Any) -> None:
    ids = loaded[kind].encode(text)
    assert ids == hf[kind].encode(text)
    assert loaded[kind].encode(text, add_special_tokens=False) == hf[kind].encode(text, add_special_tokens=False)
    plain = loaded[kind].encode(text, parse_special=False)
    assert plain == hf[kind].encode(text, split_special_tokens=True)
    for skip in (True, False):
        for some in (ids, ids[1:], plain):
            reference = hf[kind].decode(some, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert loaded[kind].decode(some, skip_special_tokens=skip) == reference


def test_sentencepiece_converted_by_transformers(folders: Any, loaded: Any, tmp_path: Path) -> None:
    """The same `tokenizer.model` in transformers, whose conversion omits the dummy prefix before a leading space."""
    pytest.importorskip("google.protobuf", reason="transformers converts with it")
    tokenizer = loaded["sp-bpe"]
    shutil.copy(folders["sp-bpe"] / "tokenizer.model", tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": False})
    reference = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    new = load_tokenizer(tmp_path)
    for text in ["the fox", *TEXTS[4:7], "a [INST] b[/INST]c", "<s>the fox</s> dog"]:
        assert new.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(tokenizer.encode(text), True), text


@pytest.mark.parametrize("kind", ["sp-bpe", "tiktoken", "json-bytes", "json-llama"])
@pytest.mark.parametrize("text", [" " * 200_000, "a" * 60_000, "b " * 40_000, "x" + "\n" * 60_000 + "y"])
def test_long_runs_of_one_kind_of_character(kind: str, text: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_text_without_long_runs_is_not_cut(loaded: Any) -> None:
    text = "the " * 9_000 + "the fox " + " " * 24_000 + "<|eot_id|>" + "a" * 24_000
    tokenizer = loaded["tiktoken"]
    assert tokenizer.encode(text)[1:] == tokenizer._encoding.encode(text, allowed_special="all")


def test_special_tokens_are_parsed_or_plain(loaded: dict[str, Tokenizer]) -> None:
    for kind, text in [("sp-bpe", "[INST]"), ("tiktoken", "<|eot_id|>"), ("json-bytes", "<|im_end|>")]:
        tokenizer = loaded[kind]
        (id,) = tokenizer.encode(text, add_special_tokens=False)
        assert id in tokenizer.special_ids and tokenizer.token_bytes(id) == text.encode()
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert len(plain) > 1 and not tokenizer.special_ids & set(plain) and tokenizer.decode(plain) == text
        assert tokenizer.decode([id]) == "" and tokenizer.decode([id], skip_special_tokens=False) == text


def test_legacy_sentencepiece_puts_a_dummy_prefix_after_each_special_token(folder: Any) -> None:
    path = folder("sp-bpe")
    for legacy, pieces in [(True, ["▁a", "▁b"]), (False, ["▁a", "b"])]:
        write_json(path / "tokenizer_config.json", {"legacy": legacy})
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode("a[INST]b", add_special_tokens=False)
        texts = [tokenizer.token_text(i).replace(" ", "▁") for i in ids]
        assert "".join(texts).split("[INST]") == pieces


def test_llama3_layout(loaded: Any, folders: Any) -> None:
    tokenizer = loaded["tiktoken"]
    base = len((folders["tiktoken"] / "tokenizer.model").read_text().splitlines())
    assert tokenizer.vocab_size == base + 256 and len(tokenizer.special_ids) == 256 and tokenizer.bos_id == base
    # the published list: https://github.com/meta-llama/llama-models, models/llama3/tokenizer.py of release 0.3.0
    named = [
        "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
        "<|python_tag|>", "<|image|>",
    ]  # fmt: skip
    published = [*named, *(f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(named)))]
    assert [tokenizer.token_text(base + i) for i in range(256)] == published
    assert set(tokenizer.eos_ids) == {base + 1, base + 8, base + 9}


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_add_up_to_the_text(kind: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    text = "the naïve fox 日本" + ("" if kind == "json-metaspace" else " 🦊")
    whole = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
    assert whole.decode().removeprefix(" ") == text
    assert len({tokenizer.token_text(i) for i in range(tokenizer.vocab_size)}) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_surrogate_is_replaced(kind: str, loaded: dict[str, Tokenizer]) -> None:
    assert loaded[kind].encode("a\ud800b") == loaded[kind].encode("a\ufffdb")


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_tokenizer(kind: str, loaded: dict[str, Tokenizer]) -> None:
    def encode(i: int) -> list[int]:
        return loaded[kind].encode(LINES[i % 20], parse_special=i % 2 == 0)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, range(200))) == [encode(i) for i in range(200)]


# ----------------------------------------------------------------------------------------------- incremental decoding


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: list[int]) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, prompt)
    return [detokenizer.push(i) for i in ids], detokenizer.flush()


@cache
def lists_of_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of any kind. Those that split UTF-8 characters are more frequent than in a uniform draw."""
    whole = [b"\xf0\x9f\xa6\x8a"[i : i + 1] for i in range(4)]
    parts = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in [*whole, b" ", b"\xe2", b"\x96"]]
    special = sorted(tokenizer.special_ids)[:12]
    one = st.sampled_from(parts or special) | st.sampled_from(special) | st.integers(0, tokenizer.vocab_size - 1)
    return st.lists(one, max_size=12)


def some_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    return data.draw(lists_of_ids(tokenizer))


@cache
def sentencepiece_of(file: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


PROPERTY = settings(max_examples=120, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_pushed_text_is_the_decoded_text(kind: str, loaded: Any, folders: Any, hf: Any, data: Any, skip: bool) -> None:
    tokenizer = loaded[kind]
    ids = some_ids(data, tokenizer)
    pushed, rest = stream(tokenizer, ids, skip, [])
    text = tokenizer.decode(ids, skip)
    assert "".join(pushed) + rest == text
    kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    whole = b"".join(map(tokenizer.token_bytes, kept))
    if kind in ("tiktoken", "json-bytes"):
        assert text == whole.decode("utf-8", "replace")
    if kind in ("json-bytes", "json-metaspace"):
        assert text == hf[kind].decode(ids, skip, clean_up_tokenization_spaces=False)
    if kind == "json-llama" and "\ufffd" not in text:
        assert text == hf[kind].decode(ids, skip, clean_up_tokenization_spaces=False)
    if kind.startswith("sp") and skip:
        assert text == sentencepiece_of(folders[kind] / "tokenizer.model").decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_text_after_a_prompt_continues_it(kind: str, loaded: Any, data: Any, skip: bool) -> None:
    tokenizer = loaded[kind]
    prompt, ids = some_ids(data, tokenizer), some_ids(data, tokenizer)
    pushed, rest = stream(tokenizer, ids, skip, prompt)
    before, _ = stream(tokenizer, prompt, skip, [])
    assert "".join([*before, *pushed]) + rest == tokenizer.decode(prompt + ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(PROPERTY, max_examples=40)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_comes_back_in_whole_characters(kind: str, loaded: Any, text: str) -> None:
    if kind in ("sp-unigram", "json-metaspace") or "▁" in text:
        return  # these lose text: a normalizer, no byte fallback, a literal ▁
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, parse_special=False)
    pushed, rest = stream(tokenizer, ids, True, [])
    assert "".join(pushed) == text and rest == ""
    assert "\ufffd" in text or not any("\ufffd" in part for part in pushed)


# ------------------------------------------------------------------------------------------------------ chat templates

OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"tools": [{"type": "function", "function": {"name": "f", "description": "é <x>"}}]},
    {"documents": [{"title": "T", "text": "ü"}]},
    {"date": "1 Jan"},
    {"bos_token": "!"},
]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["json-bytes", "json-llama"])
def test_chat_is_transformers(template: str, options: Any, kind: str, loaded: Any, hf: Any) -> None:
    options = {"add_generation_prompt": True, "chat_template": template, **options}
    expected = hf[kind].apply_chat_template(CHAT, tokenize=False, **options)
    assert loaded[kind].render_chat(CHAT, **options) == expected
    ids = hf[kind].apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
    assert loaded[kind].encode_chat(CHAT, **options) == ids


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, "{{ messages[-1].content | trim }} ."])
@pytest.mark.parametrize("content", ["The answer is", " ends in spaces  ", [{"type": "text", "text": "part "}]])
def test_continue_final_message_is_transformers(template: str, content: Any, loaded: Any, hf: Any) -> None:
    if isinstance(content, list):
        template = "{% for m in messages %}{{ m.content[0].text if m.content is not string else m.content }};{% endfor %}"
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    options = {"chat_template": template, "continue_final_message": True, "add_generation_prompt": False}
    expected = hf["json-bytes"].apply_chat_template(chat, tokenize=False, **options)
    assert loaded["json-bytes"].render_chat(chat, **options) == expected
    assert chat[-1]["content"] == content


def test_none_and_reasoning_are_as_in_transformers(loaded: Any, hf: Any) -> None:
    template = "{% for m in messages %}{{ m | tojson }}{{ m.content is defined }}{% endfor %}"
    chat = [{"role": "assistant", "content": "x", "name": None, "tool_calls": None, "reasoning": "hm"}]
    expected = hf["json-bytes"].apply_chat_template(chat, tokenize=False, chat_template=template)
    assert loaded["json-bytes"].render_chat(chat, chat_template=template, add_generation_prompt=False) == expected


def test_tiktoken_chat_has_one_bos_and_special_ids(loaded: Any) -> None:
    tokenizer = loaded["tiktoken"]
    ids = tokenizer.encode_chat(CHAT)
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    assert sum(i == tokenizer.bos_id + 9 for i in ids) == 4
    assert datetime.now().strftime("%Y") in tokenizer.decode(ids)


def test_templates_by_file_and_by_name(folder: Any) -> None:
    path = folder("json-bytes")
    config = json.loads((path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_json(path / "tokenizer_config.json", {**config, "chat_template": named})
    reference = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = load_tokenizer(path)
    for options in ({}, {"tools": [{"name": "f"}]}, {"chat_template": "tool_use"}, {"chat_template": "given"}):
        assert tokenizer.render_chat(CHAT, **options) == reference.apply_chat_template(CHAT, tokenize=False, **options)
    (path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert load_tokenizer(path).chat_template == "file {{ bos_token }}"
    assert load_tokenizer(path).render_chat(CHAT) == "file <|begin|>"


def test_a_template_may_read_tools_in_the_system_message(loaded: dict[str, Tokenizer]) -> None:
    """That of Phi-4-mini, which transformers renders as this."""
    template = (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
        "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    )
    function = {"name": "weather", "description": "é <|end|>", "parameters": {"type": "object", "properties": {}}}
    tools, user = [{"type": "function", "function": function}], {"role": "user", "content": "Hi"}
    for system, text in ([], ""), ([{"role": "system", "content": "Be brief."}], "Be brief."):
        given: Any = {"chat_template": template, "tools": tools, "add_generation_prompt": False}
        expected = f"<|system|>{text}<|tool|>{json.dumps([function], ensure_ascii=False)}<|/tool|><|end|><|user|>Hi<|end|>"
        assert loaded["json-bytes"].render_chat([*system, user], **given) == expected
        plain = f"<|system|>{text}<|end|>" * len(system) + "<|user|>Hi<|end|>"
        assert loaded["json-bytes"].render_chat([*system, user], **given | {"tools": None}) == plain


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[0].content.nothing.more }}", "undefined|no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_a_failing_template_is_a_user_error(template: str, says: str, loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(UserError, match=says) as e:
        loaded["json-bytes"].render_chat(CHAT, chat_template=template)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        (["hi"], {}),
        (CHAT, {"continue_final_message": True}),
        ([{"role": "user", "content": {}}], {"continue_final_message": True, "add_generation_prompt": False}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False, "chat_template": "x"}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False, "chat_template": "{# content #}"}),
    ],
)
def test_unusable_messages_are_user_errors(messages: Any, options: Any, loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(UserError):
        loaded["json-bytes"].render_chat(messages, **options)


def test_no_template_says_how_to_mend_it(loaded: dict[str, Tokenizer]) -> None:
    assert loaded["sp-bpe"].chat_template is None
    with pytest.raises(UserError, match="no chat template; pass chat_template"):
        loaded["sp-bpe"].render_chat(CHAT)
    assert loaded["sp-bpe"].render_chat(CHAT[:1], chat_template=MISTRAL).startswith("<s>[INST]")


# -------------------------------------------------------------------------------------------------------- loading, eos


def test_eos_ids_are_merged_in_order(folder: Any) -> None:
    path = folder("json-bytes")
    assert load_tokenizer(path).eos_ids == (3,)
    write_json(path / "config.json", {"eos_token_id": 1})
    write_json(path / "generation_config.json", {"eos_token_id": [7, 3]})
    assert load_tokenizer(path).eos_ids == (7, 3, 1)


@pytest.mark.parametrize("nested", [False, True])
def test_bos_and_eos_from_config_json_alone(nested: bool, folder: Any) -> None:
    path = folder("json-bytes")
    (path / "tokenizer_config.json").unlink()
    own = {"bos_token_id": 0, "eos_token_id": 1}
    write_json(path / "config.json", {"text_config": own, "bos_token_id": None} if nested else own)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,)) and tokenizer.encode("fox")[0] == 0
    assert tokenizer.render_chat(CHAT, chat_template="{{ bos_token }}") == "<|begin|>"


def test_a_named_token_is_special_even_if_not_flagged(folder: Any) -> None:
    path = folder("json-bytes")
    content = json.loads((path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "<|im_end|>"
    write_json(path / "tokenizer.json", content)
    tokenizer, reference = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode("the fox<|im_end|>")
    assert ids == reference.encode("the fox<|im_end|>") and ids[-1] in tokenizer.special_ids
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "the fox"


@pytest.mark.parametrize("kind", ["sp-bpe", "tiktoken"])
def test_add_bos_token_and_add_eos_token_are_obeyed(kind: str, folder: Any) -> None:
    path = folder(kind)
    bare = load_tokenizer(path).encode("the fox", add_special_tokens=False)
    for bos, eos in product((True, False), repeat=2):
        write_json(path / "tokenizer_config.json", {"add_bos_token": bos, "add_eos_token": eos})
        tokenizer = load_tokenizer(path)
        expected = [tokenizer.bos_id] * bos + bare + [tokenizer.eos_ids[0]] * eos
        assert tokenizer.encode("the fox") == expected
        messages, template = [{"role": "user", "content": "the fox"}], "{{ messages[0].content }}"
        assert tokenizer.encode_chat(messages, chat_template=template, add_special_tokens=True) == expected
    assert not tokenizer.remarks


@pytest.mark.parametrize("single", ["<|begin|> $A", "$A <|end|>", "<|begin|> $A <|end|>", "$A"])
def test_the_post_processor_alone_adds_special_tokens(single: str, folder: Any) -> None:
    path = folder("json-bytes")
    content, config = (json.loads((path / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    special = [("<|begin|>", 0), ("<|end|>", 1)]
    processor = tokenizers.Tokenizer(models.BPE())
    processor.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    content["post_processor"] = json.loads(processor.to_str())["post_processor"]
    write_json(path / "tokenizer.json", content)
    template = "{{ messages[0].content }}<|im_end|>"
    for bos, eos in product((True, False), repeat=2):
        write_json(path / "tokenizer_config.json", {**config, "add_bos_token": bos, "add_eos_token": eos})
        tokenizer, reference = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
        for text in ("the fox", "", "<|begin|>the"):
            assert tokenizer.encode(text) == reference.encode(text)
        messages = [{"role": "user", "content": "<|im_end|>the"}]  # encoded in parts
        found = tokenizer.encode_chat(messages, chat_template=template, add_special_tokens=True)
        bare = tokenizer.encode_chat(messages, chat_template=template)
        assert found == [0] * single.startswith("<") + bare + [1] * single.endswith(">")
        says = any("add_eos_token do not count" in remark for remark in tokenizer.remarks)
        assert says == ((bos, eos) != (single.startswith("<"), single.endswith(">")))


def test_a_file_can_be_named_and_json_wins_in_a_folder(folders: Any, folder: Any) -> None:
    path = folder("json-bytes")
    shutil.copy(folders["sp-bpe"] / "tokenizer.model", path)
    assert load_tokenizer(path).encode("fox") == load_tokenizer(str(path / "tokenizer.json")).encode("fox")
    assert load_tokenizer(path / "tokenizer.model").token_text(1) == "<s>"


@pytest.mark.parametrize(
    ("kind", "name", "content", "says"),
    [
        ("", "tokenizer.json", b"{", ";"),
        ("", "tokenizer.json", b"\xff", ";"),
        ("", "tokenizer.json", b'{"model": 1}', ";"),
        ("", "tokenizer.model", b"", ";"),
        ("", "tokenizer.model", b"\x00garbage" * 9, ";"),
        ("", "tokenizer.model", b"IQ== 0\nIg== x\n", ";"),
        ("", "tokenizer.model", b"IQ== 0\nIg== 1\n", ";"),
        ("", "tokenizer.model", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("", "readme.md", b"", "no tokenizer at"),
        ("json-bytes", "tokenizer_config.json", b"{", r"tokenizer_config\.json"),
        ("json-bytes", "tokenizer_config.json", b"[]", r"tokenizer_config\.json"),
        ("json-bytes", "tokenizer_config.json", b'{"chat_template": [{}]}', r"tokenizer_config\.json"),
        ("json-bytes", "tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', r"tokenizer_config\.json"),
        ("json-bytes", "tokenizer_config.json", b'{"added_tokens_decoder": {"300": {"content": "<x>"}}}', "'<x>' the id 300"),
        ("sp-bpe", "tokenizer_config.json", b'{"added_tokens_decoder": {"99999999999": {"content": "x"}}}', "99999999999"),
        ("json-bytes", "chat_template.jinja", b"\xff", r"chat_template\.jinja is not UTF-8"),
        ("json-bytes", "config.json", b'{"eos_token_id": "x"}', "eos_token_id"),
    ],
)
def test_files_that_cannot_be_used(kind: str, name: str, content: bytes, says: str, folder: Any, tmp_path: Path) -> None:
    path = folder(kind) if kind else tmp_path
    (path / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as e:
        load_tokenizer(path)
    assert "\n" not in str(e.value)


# ------------------------------------------------------------------------------------------------------ added tokens

NEW = ["<|x|>", "[CALL]", " spaced ", "<think>"]


def write_added_tokens(path: Path) -> list[str]:
    """Write the files of a tokenizer, which name its added tokens in random ways. Returns their texts."""
    content = json.loads((path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = random.random() < 0.6
    write_json(path / "tokenizer.json", content)
    old, new = [token["content"] for token in content["added_tokens"]], random.sample(NEW, random.randint(1, len(NEW)))
    free = 1 + max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"]))
    ids = {token["content"]: token["id"] for token in content["added_tokens"]} | {text: free + i for i, text in enumerate(new)}

    def some(least: int = 1) -> list[str]:
        return random.sample([*old, *new], random.randint(least, len(ids)))

    def flags(text: str) -> dict[str, Any]:
        strips = {"lstrip": random.random() < 0.2, "rstrip": random.random() < 0.2}
        return {"content": text, **strips, "single_word": False, "normalized": random.random() < 0.3}

    names = dict(zip(("bos_token", "pad_token", "sep_token", "eoc_token"), some(), strict=False))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": random.choice(list(ids))}
    listed = {random.choice(["additional_special_tokens", "extra_special_tokens"]): some()} if random.random() < 0.5 else {}
    match random.randrange(3):
        case 0:
            decoder = {str(ids[text]): {**flags(text), "special": random.random() < 0.5} for text in {*some(), *new}}
            config |= {"added_tokens_decoder": decoder, **names, **listed}
            write_json(path / "special_tokens_map.json", {"unk_token": random.choice(list(ids))})
        case 1:  # transformers forgets that what `added_tokens.json` adds is listed in the other file
            write_json(path / "special_tokens_map.json", {name: flags(text) for name, text in names.items()})
            write_json(path / "added_tokens.json", {text: ids[text] for text in new})
            config |= listed
        case 2:
            write_json(path / "special_tokens_map.json", {**names, **listed})
    write_json(path / "tokenizer_config.json", config)
    return list(ids)


@pytest.mark.parametrize("_number", range(16))
def test_added_tokens_are_those_of_transformers(_number: int, folder: Any, seed: int) -> None:
    path = folder("json-bytes")
    texts = write_added_tokens(path)
    tokenizer, reference = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    vocab = reference.get_vocab()
    assert tokenizer.vocab_size == len(vocab)
    known = [text for text in texts if text in vocab]
    assert [tokenizer.token_text(vocab[text]) for text in known] == known
    hidden = {i for i in vocab.values() if not reference.decode([i], skip_special_tokens=True) and reference.decode([i])}
    assert tokenizer.special_ids == hidden
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert tokenizer.names.get(name) == getattr(reference, name), name
    words = [*texts, "the", " fox", "  ", " a "]
    text = "".join(random.choice(words) for _ in range(40))
    for special in (True, False):
        assert tokenizer.encode(text, special) == reference.encode(text, add_special_tokens=special)
    assert tokenizer.encode(text, False, False) == reference.encode(text, add_special_tokens=False, split_special_tokens=True)
    ids = [*random.sample(range(len(vocab)), 40), *(vocab[text] for text in known)]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    for control in {text for text in known if vocab[text] in hidden}:
        forged = tokenizer.encode_chat([{"role": "user", "content": f"a{control}b"}], chat_template="{{ messages[0].content }}")
        assert not hidden & set(forged)


def test_a_token_that_two_files_call_special_and_not_is_special(folder: Any) -> None:
    """Each as the only one: an older file that lists it, a newer one that has an object for it."""
    path = folder("json-bytes")
    size = load_tokenizer(path).vocab_size
    config = json.loads((path / "tokenizer_config.json").read_text())
    write_json(path / "added_tokens.json", {"<|x|>": size})
    write_json(path / "special_tokens_map.json", {"additional_special_tokens": ["<|x|>"]})
    assert size in load_tokenizer(path).special_ids
    plain = {"content": "<tool> 日", "special": False}
    for special in (True, False):
        tokens = {"added_tokens_decoder": {str(size - 1): {**plain, "special": special}}}
        write_json(path / "tokenizer_config.json", {**config, **tokens})
        tokenizer = load_tokenizer(path)
        assert tokenizer.token_text(size - 1) == "<tool> 日" and (size - 1 in tokenizer.special_ids) == special


@pytest.mark.parametrize("kind", ["sp-bpe", "tiktoken", "json-bytes"])
def test_an_end_that_only_added_tokens_json_has(kind: str, folder: Any) -> None:
    path = folder(kind)
    size = load_tokenizer(path).vocab_size
    write_json(path / "added_tokens.json", {"<|stop|>": size})
    write_json(path / "special_tokens_map.json", {"eos_token": {"content": "<|stop|>", "lstrip": False}})
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_ids[0] == size and tokenizer.vocab_size == size + 1
    assert tokenizer.encode("the<|stop|>", False)[-1] == size and tokenizer.decode([size]) == ""
    forged = tokenizer.encode_chat([{"role": "user", "content": "a<|stop|>b"}], chat_template="{{ messages[0].content }}")
    assert size not in forged


@pytest.mark.parametrize("kind", ["sp-bpe", "tiktoken", "json-bytes"])
def test_an_end_that_the_tokenizer_cannot_write_is_a_user_error(kind: str, folder: Any) -> None:
    path = folder(kind)
    size = load_tokenizer(path).vocab_size
    for ends in (size, [1, size + 5]):
        write_json(path / "config.json", {"eos_token_id": ends})
        with pytest.raises(UserError, match=rf"eos_token_id ({size}|{size + 5}) .* is no token"):
            load_tokenizer(path)
    (path / "config.json").unlink()
    write_json(path / "generation_config.json", {"eos_token_id": [size]})
    with pytest.raises(UserError, match="no answer could end"):
        load_tokenizer(path)
    write_json(path / "added_tokens.json", {"<|stop|>": size})
    assert load_tokenizer(path).eos_ids[0] == size


def test_an_added_token_without_an_embedding_is_left_out(folder: Any) -> None:
    """As in checkpoints whose padding token came later; but an end among them is an error."""
    path = folder("json-bytes")
    size = load_tokenizer(path).vocab_size
    write_json(path / "config.json", {"vocab_size": size})
    config = {"pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(path / "tokenizer_config.json", config)
    write_json(path / "added_tokens.json", {"<pad>": size})
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == size and any("'<pad>'" in remark for remark in tokenizer.remarks)
    write_json(path / "tokenizer_config.json", {**config, "eos_token": "<pad>"})
    with pytest.raises(UserError, match=r"eos_token '<pad>' .* is no token"):
        load_tokenizer(path)


# ----------------------------------------------------------------------------------------------------- other decoders

GGUF = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
DECODERS = {  # whether the table of pieces has it
    "gguf": (decoders.Sequence(GGUF), True),
    "metaspace": (decoders.Metaspace(prepend_scheme="never"), True),
    "wordpiece": (decoders.WordPiece(), False),
    "wordpiece-raw": (decoders.WordPiece("##", False), False),
    "ctc": (decoders.CTC("<pad>", "|", True), False),
    "bpe": (decoders.BPEDecoder("</w>"), False),
    "none": (None, False),
    "fuse": (decoders.Fuse(), False),
    "strip": (decoders.Strip(" ", 1, 1), False),
    "strip-each": (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]), False),
    "strip-end": (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]), False),
    "bytes": (decoders.ByteFallback(), False),
    "bytes-metaspace": (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), False),
    "metaspace-strip": (decoders.Sequence([decoders.Metaspace(), decoders.Strip(" ", 1, 0)]), False),
    "metaspace-_": (decoders.Metaspace("_"), False),
    "replace": (decoders.Sequence([decoders.Replace("_x", " "), decoders.Fuse()]), False),
    "strip-bytes": (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteLevel()]), False),
}
WORDS_OF_DECODERS = [
    "▁the",
    "▁fox",
    "fox",
    "▁",
    "##ing",
    "a</w>",
    "<pad>",
    "|",
    "n't",
    "'m",
    " do not",
    "日本",
    "▁▁",
    "_x",
    ".",
]


@pytest.mark.parametrize("name", DECODERS)
def test_any_decoder_of_the_library(name: str, tmp_path: Path, seed: int) -> None:
    """The text of random ids, whole and in a stream, and the text after a prompt."""
    decoder, in_table = DECODERS[name]
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = ["Ġthe", "fox", "Ġ"] if name == "gguf" else [*WORDS_OF_DECODERS, *(f"<0x{b:02X}>" for b in "a 🦊é\n".encode())]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*parts, *byte_level]))}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        library.decoder = decoder
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens(["<tool>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.has_exact_bytes == in_table
    size = library.get_vocab_size()
    for _ in range(60):
        most = random.choice([size, len(parts)])
        ids = [random.randrange(most) if random.random() < 0.9 else size - 1 for _ in range(random.choice([1, 4, 12, 150]))]
        if name == "strip-end":  # the library panics where there is no text at all
            ids.insert(0, vocab["fox"])
        for skip in (True, False):
            expected = library.decode(ids, skip_special_tokens=skip)
            pushed, rest = stream(tokenizer, ids, skip, [])
            assert tokenizer.decode(ids, skip) == "".join(pushed) + rest == expected
        cut = random.randrange(len(ids))
        before, after = library.decode(ids[:cut]) if cut else "", library.decode(ids)
        pushed, rest = stream(tokenizer, ids[cut:], True, ids[:cut])
        if after.startswith(before) and not before.endswith("\ufffd"):
            assert before + "".join(pushed) + rest == after


def test_text_of_another_decoder_comes_at_once(tmp_path: Path) -> None:
    words = ["the", "fox", "##es", ".", "[UNK]"]
    library = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    pushed, rest = stream(tokenizer, [0, 1, 2, 3], True, [])
    assert pushed == ["the", " fox", "es", "."] and rest == ""
    assert [tokenizer.token_text(i) for i in range(4)] == [" the", " fox", "es", "."]
    with pytest.raises(UserError, match="cannot follow a grammar"):
        Grammars(tokenizer, tokenizer.vocab_size).check("start: /a/")


def test_a_decoder_that_cannot_be_streamed_is_a_user_error(folder: Any) -> None:
    path = folder("json-llama")
    content = json.loads((path / "tokenizer.json").read_text())
    content["decoder"]["decoders"].append({"type": "Replace", "pattern": {"String": "ab"}, "content": "c"})
    write_json(path / "tokenizer.json", content)
    with pytest.raises(UserError, match="cannot be streamed"):
        load_tokenizer(path)


def test_a_panic_of_the_library_is_a_user_error(tmp_path: Path) -> None:
    """The library strips an empty text's end beyond its start. Its exception is no `Exception`."""
    library = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1}, merges=[]))
    library.decoder = decoders.Sequence([decoders.Replace("▁", ""), decoders.Strip(" ", 0, 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the tokenizers library failed"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_user_errors(kind: str, loaded: dict[str, Tokenizer]) -> None:
    for id in (-1, loaded[kind].vocab_size):
        with pytest.raises(UserError, match="outside"):
            loaded[kind].decode([1, id])
    check_fits(loaded[kind], loaded[kind].vocab_size)
    with pytest.raises(UserError, match="vocab_size"):
        check_fits(loaded[kind], loaded[kind].vocab_size - 1)


def test_a_token_covers_only_so_many_characters(loaded: dict[str, Tokenizer]) -> None:
    """`covers` bounds the ids of a text from below, so a server can refuse a text that is too long without tokenizing it."""
    found = {kind: one.covers for kind, one in loaded.items()}
    assert found["json-bytes"] and found["tiktoken"]
    alphabets = ["a", " ", "word ", "\u200b", "\x01", "e\u0301", "\u1100\u1161\u11a8", "\U0001f409", "\n", "\ue000", "<|end|>"]
    for kind, tokenizer in loaded.items():
        for text in (one * 1000 for one in (*alphabets, "".join(alphabets))):
            assert found[kind] is None or len(tokenizer.encode(text, add_special_tokens=False)) * found[kind] >= len(text), kind


@pytest.mark.parametrize("kind", ["json-bytes", "sp-bpe", "sp-unigram", "tiktoken", "json-llama", "json-metaspace"])
def test_control_tokens_in_a_message_are_text(loaded: dict[str, Tokenizer], kind: str) -> None:
    """In any field: the control tokens are those of a harmless conversation, and the text is unchanged."""
    tokenizer = loaded[kind]
    controls = [tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)]
    first = controls[-1]
    template = "{% for m in messages %}" + first + "{{ m.role }}: {{ m.content | trim }}{{ m.name }}{{ m.calls | tojson }}"
    template += "{{ tools | tojson }}{{ extra }}" + first + "{% endfor %}"

    def ids(text: str, **options: Any) -> list[int]:
        message = {"role": "user", "content": f" {text} ", "name": text, "calls": [{text: [text]}]}
        return tokenizer.encode_chat([message], tools=[{"name": text}], extra=text, chat_template=template, **options)

    def special(found: list[int]) -> list[int]:
        return [i for i in found if i in tokenizer.special_ids and tokenizer.token_text(i).strip() != "<unk>"]

    for forged in (*controls, "".join(controls), f"a{first}b", first[1:], first[:-1], first[:-1] + "\ue000"):
        found = ids(forged)
        assert special(found) == special(ids("harmless")), forged
        plain = tokenizer.decode(found, skip_special_tokens=False)
        # these kinds have no token for some characters
        assert plain.count(forged) >= 5 or kind in ("sp-bpe", "sp-unigram", "json-metaspace"), (forged, plain)
    assert len(special(ids(first, parse_special=True))) > 2
    harmless = "Zoë saw a 🐉 <b>\n  here | > <"
    assert ids(harmless) == ids(harmless, parse_special=True)


@pytest.mark.parametrize("edge", ["<", ">", "<|", "|>", "</", "<s"])
@pytest.mark.parametrize("kind", ["json-bytes", "json-llama", "json-metaspace"])
def test_text_in_parts_is_text_as_a_whole(loaded: dict[str, Tokenizer], hf: dict[str, Any], kind: str, edge: str) -> None:
    """Text with part of a control token is encoded in parts. Its ids must still be those of transformers."""
    chat = [{"role": "user", "content": f"{edge} some words {edge}"}, {"role": "assistant", "content": edge}]
    template = loaded[kind].chat_templates.get("default", MISTRAL)
    expected = hf[kind].apply_chat_template(chat, tokenize=True, return_dict=False, chat_template=template)
    assert loaded[kind].encode_chat(chat, chat_template=template, add_generation_prompt=False) == expected


# ------------------------------------------------------------------------------------------------- offsets of a prompt


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_offsets_of_ids_are_lengths_of_the_text_before_them(kind: str, loaded: Any, data: Any, skip: bool) -> None:
    """Also where a special token that is left out stands between the bytes of a character."""
    tokenizer = loaded[kind]
    ids = some_ids(data, tokenizer)
    pushed, _ = stream(tokenizer, ids, skip, [])
    expected = [len("".join(pushed[:i])) for i in range(len(ids))]
    assert text_offsets(tokenizer, ids, tokenizer.decode(ids, skip), skip) == expected


def without_spaces(text: str | bytes) -> str:
    return "".join((text if isinstance(text, str) else text.decode(errors="ignore")).split())


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_offsets_in_a_text_whose_spaces_are_dropped(kind: str, loaded: Any, data: Any, skip: bool) -> None:
    tokenizer = loaded[kind]
    special = [tokenizer.token_text(id) for id in (tokenizer.bos_id, tokenizer.eos_ids[0])]
    words = st.sampled_from([*WORDS.split(), *special])
    spaces = st.sampled_from(["", " ", "  ", "\n", "\t", " \n ", "\r\n\n", " " * 100])
    text = "".join(data.draw(st.lists(words | spaces, max_size=20)))
    ids = tokenizer.encode(text)
    offsets = text_offsets(tokenizer, ids, text, skip)
    assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
    # Apart from spaces, the text before a piece is the pieces before it. The first piece is the added BOS.
    pieces = [b"" if tokenizer.token_text(i) == "<unk>" else tokenizer.token_bytes(i) for i in ids[1:]]
    for i, offset in enumerate(offsets[1:]):
        assert without_spaces(text[:offset]) == without_spaces(b"".join(pieces[:i]))
        word = pieces[i].decode(errors="replace").lstrip(" ")
        assert "\ufffd" in word or text[offset:].lstrip(" ").startswith(word)

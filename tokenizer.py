"""Text to token ids and back: sentencepiece, tiktoken and Hugging Face `tokenizer.json` behind one class; chat templates.

`load_tokenizer(folder)` returns a `Tokenizer`. A preset has no vocabulary; `tokenizer_of` gives it a `ByteTokenizer`.
All kinds share one decoder, `IncrementalDetokenizer`. `decode` also uses it, so streamed text and whole text cannot
differ. There are two rules of decoding:

- byte-level BPE and tiktoken: a text is one stream of bytes. Each maximal invalid part of UTF-8 becomes one U+FFFD.
- sentencepiece: pieces are whole characters, except byte tokens such as `<0xE2>`. A run of byte tokens ends at the next
  piece, and each of its invalid bytes becomes one U+FFFD. `▁` is a space, and the one at the start of a text is dropped.

A `tokenizer.json` whose decoder has `ByteFallback` follows the second rule. The `tokenizers` library differs there: for
one invalid byte it turns the whole run into U+FFFD, which cannot be streamed. `clean_up_tokenization_spaces` is ignored,
because it changes text.
"""

import base64
import codecs
import functools
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from control_tokens import Guard, Spellings
from errors import UserError
from files import CONFIG_BYTES, TOKENIZER_BYTES, read_file, read_json
from presets import is_shape, named_config

Message = Mapping[str, Any]

# Llama 3's split pattern and special tokens, from llama_models 0.3 (models/llama3/tokenizer.py). A checkpoint of the HF
# layout has other names for some reserved tokens in `added_tokens_decoder`; those take precedence.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = (
    "begin_of_text,end_of_text,reserved_special_token_0,reserved_special_token_1,finetune_right_pad_id,step_id,"
    "start_header_id,end_header_id,eom_id,eot_id,python_tag,image,"
    + ",".join(f"reserved_special_token_{i}" for i in range(2, 246))
)
LLAMA3_SPECIALS = [f"<|{name}|>" for name in LLAMA3_NAMES.split(",")]
MAX_RUN = 25_000  # characters; tiktoken's regex engine fails on longer runs of whitespace; Llama 3's own code cuts here, too
MAX_ID = 1 << 24  # far above any vocabulary; a larger id in a corrupt file would fill the memory with empty pieces
RENDER_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)  # arguments of render_chat that are not text of the conversation
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
PLAIN_CHAT = (  # the template of ByteTokenizer
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DROPPED = " \u200b\x01\u0301"  # characters that a normalizer may drop
PROBE = 4096  # characters, far more than the longest token has
MOST_COMPOSED = 4  # most characters that canonical composition turns into one
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model")  # the first one that exists is used
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers; the trailing space shows whether the template strips

codecs.register_error("replace-each-byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ the interface


@dataclass
class Settings:
    """Settings from the JSON files in a tokenizer's folder. Tokens are given by their texts. `None`: not in the files."""

    names: dict[str, str] = field(default_factory=dict)  # texts of bos_token, eos_token, pad_token, ...
    added: dict[int, tuple[str, bool]] = field(default_factory=dict)  # id: (text, special)
    add_bos: bool | None = None
    legacy: bool = True  # sentencepiece: a dummy prefix also after every special token, not only at the start of the text
    bos_id: int | None = None  # from config.json, in case the files do not name the token
    eos_ids: tuple[int, ...] = ()
    templates: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pieces:
    """How ids become text: the table that `IncrementalDetokenizer` uses."""

    data: list[bytes]  # by id: its bytes in the middle of a text; empty for an unused id
    byte_ids: frozenset[int] = frozenset()  # sentencepiece's byte tokens, and its unknown token
    stream: bool = True  # byte-level: one stream of bytes; else pieces of whole characters
    lead: str = "keep"  # rule for a text's start: keep; piece, pieces (sentencepiece); strip, metaspace (tokenizer.json)


class Tokenizer(ABC):
    """One vocabulary. Immutable after loading, so that threads may share it."""

    def __init__(self, pieces: Pieces, special_ids: frozenset[int], bos: int | None, eos: Sequence[int], s: Settings):
        self.pieces = pieces
        self.vocab_size = len(pieces.data)  # ids run from 0 to vocab_size - 1, specials included
        self.special_ids = special_ids
        self.bos_id = bos
        self.eos_ids = tuple(dict.fromkeys([*s.eos_ids, *eos]))  # any of them ends generation
        self.chat_templates = s.templates  # by name
        self.chat_template = s.templates.get("default")
        self.covers: int | None = max(map(len, pieces.data), default=1)  # most characters of a text that become one id;
        # None if there is no bound, because the tokenizer drops characters or makes one id of several unknown ones
        self.add_bos = bos is not None and s.add_bos is not False
        self._names = dict(s.names)  # the templates' variables bos_token, eos_token, ...
        for name, ids in (("bos_token", [] if bos is None else [bos]), ("eos_token", eos)):
            if ids and name not in self._names:
                self._names[name] = self.token_text(ids[0])

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        `add_special_tokens` puts BOS in front if the checkpoint does so. With `parse_special`, the texts of special
        tokens become those tokens; without, they are plain text. Lone surrogates, which JSON can contain, become U+FFFD.
        """
        return self._encode(_whole_characters(text), add_special_tokens, parse_special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, decoded as the start of a text. Raises UserError for an id outside the vocabulary."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of an id in the middle of a text. A special token's bytes are its text in UTF-8.

        Raises UserError for an id outside the vocabulary.
        """
        if not 0 <= id < self.vocab_size:
            raise UserError(f"token id {id} is outside the vocabulary; use ids from 0 to {self.vocab_size - 1}")
        return self.pieces.data[id]

    def token_text(self, id: int) -> str:
        """The token as text for display, with U+FFFD for bytes that are not whole characters."""
        return self.token_bytes(id).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as one text, as transformers' `apply_chat_template(..., tokenize=False)` renders it.

        `chat_template` is a template or the name of one in the checkpoint. `continue_final_message` ends the text
        directly after the last message's content and excludes `add_generation_prompt`. `kwargs` (such as `documents`)
        are variables for the template. Raises UserError for a missing or failing template and for invalid messages.
        """
        if not messages:
            raise UserError("the conversation is empty; pass at least one message")
        if continue_final_message and add_generation_prompt:
            raise UserError("continue_final_message excludes add_generation_prompt; set add_generation_prompt to false")
        template = self._pick_template(chat_template, tools is not None)
        chat = [_plain_message(message) for message in messages]
        if continue_final_message:
            final = _tag_final_message(chat, template)
        variables = {
            **self._names,
            "documents": None,
            **kwargs,
            "messages": chat,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _compile_template(template).render(variables)
        except MemoryError:
            raise
        except Exception as e:  # a template can raise any exception, and none of them is an error of the server
            reason = " ".join(str(e).split()) or type(e).__name__
            raise UserError(f"the chat template failed: {reason}; mend the messages or pass chat_template") from e
        return _cut_after_final_message(text, final) if continue_final_message else text

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_special_tokens: bool = False,
        parse_special: bool = False,
        check: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of `render_chat(messages, **kwargs)`. The template writes BOS itself, so none is added by default.

        Control tokens that are spelled out in the caller's arguments stay text, unless `parse_special` is set, which is
        what transformers does. `check` is called with the rendered text before it is encoded.
        """
        if parse_special:
            text = self.render_chat(messages, **kwargs)
            guard = None
        else:
            shown = {name: value for name, value in kwargs.items() if name not in RENDER_OPTIONS}
            guard = Guard(self._control_tokens, list(messages), shown)
            text = self.render_chat(guard.protect(list(messages)), **{**kwargs, **guard.protect(shown)})
        if check is not None:
            check(text)
        if guard is None or not guard.used:
            return self.encode(text, add_special_tokens)
        parts = [_whole_characters(part) for part in guard.parts(text)]
        return self._encode_parts(parts, add_special_tokens)

    @functools.cached_property
    def _control_tokens(self) -> Spellings:
        return Spellings(self.token_text(i) for i in self.special_ids)

    def _encode_parts(self, parts: Sequence[str], add_special_tokens: bool) -> list[int]:
        """The ids of `parts`: plain text at even indices, special tokens at odd ones."""
        ids = self._encode("", add_special_tokens, False) if add_special_tokens else []
        for i, part in enumerate(parts):
            if part:
                ids += self._encode(part, False, bool(i % 2))
        return ids

    def _pick_template(self, wanted: str | None, with_tools: bool) -> str:
        if isinstance(wanted, str):
            return self.chat_templates.get(wanted, wanted)
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.chat_templates:
                return self.chat_templates[name]
        names = ", ".join(self.chat_templates)
        has = f"no default chat template (it has: {names})" if names else "no chat template"
        raise UserError(f"the checkpoint has {has}; pass chat_template, or add a chat_template.jinja to its folder")


class IncrementalDetokenizer:
    """Decodes ids one by one, each in constant time. The texts of all `push` calls and of `flush`, joined, equal `decode`.

    `prompt_ids` are the ids before the first pushed one. With them, a leading space is kept, and a character whose first
    bytes are at the end of the prompt is completed.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._at_start = self._pieces.lead != "keep"
        errors = "replace" if self._pieces.stream else "replace-each-byte"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        # Only two parts of the prompt have an effect: the ids up to its first text, and its last three bytes, which may
        # be the start of a character. The middle of a long prompt is not decoded.
        head = 0
        while self._at_start and head < len(prompt_ids):
            self.push(prompt_ids[head])
            head += 1
        tail, size = len(prompt_ids), 0
        while tail > head and size < 3:
            tail -= 1
            id = prompt_ids[tail]
            size += len(tokenizer.token_bytes(id)) if id not in self._skipped else 0
        for id in prompt_ids[tail:]:
            self.push(id)

    def push(self, id: int) -> str:
        """The text that `id` completes; it may be empty. Raises UserError for an id outside the vocabulary."""
        data = self._tokenizer.token_bytes(id)
        skipped = id in self._skipped
        if self._pieces.stream:
            return "" if skipped else self._utf8.decode(data)
        if id in self._pieces.byte_ids:
            return self._lead(self._utf8.decode(data), from_bytes=True)
        broken = self._lead(self._utf8.decode(b"", final=True), from_bytes=True)
        return broken if skipped else broken + self._lead(data.decode("utf-8", "replace"), from_bytes=False)

    def flush(self) -> str:
        """The rest: U+FFFD for the bytes of an incomplete character."""
        return self._lead(self._utf8.decode(b"", final=True), from_bytes=True)

    def _lead(self, text: str, from_bytes: bool) -> str:
        """Apply the rule for the start of a text (`Pieces.lead`), as the library for this kind of tokenizer does."""
        if not self._at_start or not text:
            return text
        self._at_start = False
        lead = self._pieces.lead
        if lead == "metaspace":  # the first token loses all its spaces
            return text.replace(" ", "")
        if text[0] != " " or (from_bytes and lead != "strip"):
            return text
        self._at_start = lead == "pieces" and text == " "  # a model that removes extra spaces drops one from each piece
        return text[1:]


def _whole_characters(text: str) -> str:
    """`text` with U+FFFD for lone surrogates."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError if the tokenizer has ids that a model with `vocab_size` embeddings lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is {vocab_size}; "
            "use the tokenizer that came with the checkpoint"
        )


# ---------------------------------------------------------------------------------------------------- the three kinds


class SentencePieceTokenizer(Tokenizer):
    """`tokenizer.model` of Llama 2 and Mistral, with the sentencepiece library. Decodes as that library does."""

    def __init__(self, blob: bytes, path: Path, settings: Settings):
        # Protobuf merges appended fields into the message: these bytes set normalizer_spec.add_dummy_prefix to false.
        without_prefix = blob + b"\x1a\x02\x18\x00"
        sp = _load(path, lambda: _library("sentencepiece").SentencePieceProcessor(model_proto=blob))
        bare = _load(path, lambda: _library("sentencepiece").SentencePieceProcessor(model_proto=without_prefix))
        size = sp.get_piece_size()
        if not size:
            raise UserError(f"{path} is not a sentencepiece model; download the file again")
        self._sp, self._bare, self._legacy = sp, bare, settings.legacy
        data = [sp.id_to_piece(i).replace("▁", " ").encode() for i in range(size)]
        byte_ids = frozenset(i for i in range(size) if sp.is_byte(i))
        for i in byte_ids:
            data[i] = bytes([int(sp.id_to_piece(i)[3:5], 16)])
        data[sp.unk_id()] = sp.decode([sp.unk_id()]).encode()
        byte_ids |= {sp.unk_id()}  # " ⁇ ": keeps its space at the start of a text, as a byte token does
        added = {i: token for i, token in settings.added.items() if i >= size}
        data += _added_pieces(size, added)
        special = {i for i in range(size) if sp.is_control(i)} | {i for i, token in added.items() if token[1]}
        texts = {data[i].decode(): i for i in sorted({*special, *added})}
        self._ids_of_specials, self._split = texts, _alternatives(texts)
        pieces = Pieces(data, byte_ids, stream=False, lead=self._probe_lead(size))
        bos = texts.get(settings.names.get("bos_token", ""), sp.bos_id())
        eos = texts.get(settings.names.get("eos_token", ""), sp.eos_id())
        super().__init__(pieces, frozenset(special), None if bos < 0 else bos, [eos] if eos >= 0 else [], settings)
        dropped = any(len(bare.encode(c * PROBE)) * max(map(len, data)) < PROBE for c in DROPPED)
        if dropped or len(byte_ids) <= 256:  # 257 if complete: the 256 bytes and the unknown token
            self.covers = None

    def _probe_lead(self, size: int) -> str:
        """The model's rule for the start of a text, found by decoding samples: the library does not export the flags."""
        word = next((i for i in range(size) if re.fullmatch("▁[^▁]+", self._sp.id_to_piece(i))), None)
        if word is None or self._sp.decode([word]).startswith(" "):
            return "keep"
        space = self._sp.piece_to_id("▁")
        return "piece" if self._sp.decode([space, word]).startswith(" ") else "pieces"

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        ids = [self.bos_id] if add_special_tokens and self.add_bos and self.bos_id is not None else []
        parts = self._split.split(text) if parse_special and self._split else [text]
        return ids + self._ids_of_parts(parts)

    def _encode_parts(self, parts: Sequence[str], add_special_tokens: bool) -> list[int]:
        return self._encode("", add_special_tokens, False) + self._ids_of_parts(parts)

    def _ids_of_parts(self, parts: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(parts):  # even index: plain text; odd: a special token
            if i % 2:
                ids.append(self._ids_of_specials[part])
            elif part:
                ids += (self._sp if self._legacy or i == 0 else self._bare).encode(part)
        return ids


class TiktokenTokenizer(Tokenizer):
    """Llama 3's `tokenizer.model`, with the tiktoken library. Each line has a base64 token and its rank, which is its id.
    256 special tokens have the ids after the last rank."""

    def __init__(self, blob: bytes, path: Path, settings: Settings):
        try:
            lines = [line.split() for line in blob.splitlines() if line.strip()]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except ValueError as e:
            raise UserError(f"{path} has a line that is not a base64 token and a rank; download the file again") from e
        if sorted(ranks.values()) != list(range(len(lines))) or any(bytes([i]) not in ranks for i in range(256)):
            raise UserError(f"{path} lacks ranks or single bytes; download the file again")
        names = dict(enumerate(LLAMA3_SPECIALS, len(ranks)))
        names |= {i: text for i, (text, _) in settings.added.items() if i >= len(ranks)}  # Llama 3.0 has other names
        specials = {text: i for i, text in names.items()}
        self._encoding = _library("tiktoken").Encoding(
            name=str(path), pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        added = {i: (text, True) for i, text in names.items()}
        data = sorted(ranks, key=ranks.__getitem__) + _added_pieces(len(ranks), added)
        bos = specials.get(settings.names.get("bos_token", "<|begin_of_text|>"))
        ends = [settings.names.get("eos_token", ""), "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
        eos = [specials[end] for end in ends if end in specials]
        super().__init__(Pieces(data), frozenset(names), bos, eos, settings)

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        ids = [self.bos_id] if add_special_tokens and self.add_bos and self.bos_id is not None else []
        allowed: Any = "all" if parse_special else set()
        for part in _cut_long_runs(text):
            ids += self._encoding.encode(part, allowed_special=allowed, disallowed_special=())
        return ids


def _cut_long_runs(text: str) -> Iterator[str]:
    """Split `text` only inside runs of more than MAX_RUN characters that are all whitespace or all not whitespace."""
    start = 0
    for run in re.finditer(rf"\s{{1,{MAX_RUN}}}|\S{{1,{MAX_RUN}}}", text) if len(text) > MAX_RUN else ():
        if len(run[0]) == MAX_RUN:
            yield text[start : run.end()]
            start = run.end()
    yield text[start:]


class HuggingFaceTokenizer(Tokenizer):
    """`tokenizer.json`, either byte-level BPE or a converted sentencepiece model, with the tokenizers library."""

    def __init__(self, blob: bytes, path: Path, settings: Settings):
        library = _library("tokenizers")
        self._parsing = _load(path, lambda: library.Tokenizer.from_str(blob.decode()))
        self._plain = _load(path, lambda: library.Tokenizer.from_str(blob.decode()))
        inner = re.sub(rb'("prepend_scheme"\s*:\s*)"first"', rb'\1"never"', blob)  # for text after a special token
        self._inner = _load(path, lambda: library.Tokenizer.from_str(inner.decode())) if inner != blob else self._plain
        for tokenizer in (self._plain, self._inner):
            tokenizer.encode_special_tokens = True  # a setting, not an argument: threads that change it would conflict
        for tokenizer in (self._parsing, self._plain, *([] if self._inner is self._plain else [self._inner])):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            # The config may name tokens, often EOS, that the file does not mark as special; the library reuses their ids.
            named = sorted(set(settings.names.values()))
            tokenizer.add_special_tokens([name for name in named if tokenizer.token_to_id(name) is not None])
        added = self._parsing.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special)
        self._strips_left = {token.content for token in added.values() if token.lstrip}
        self._strips_right = {token.content for token in added.values() if token.rstrip}
        vocab = {i: token for token, i in self._parsing.get_vocab(with_added_tokens=True).items()}
        pieces = _json_pieces(vocab, {i: token.content for i, token in added.items()}, json.loads(blob), path)
        bos, eos = (self._parsing.token_to_id(settings.names.get(name, "")) for name in ("bos_token", "eos_token"))
        if bos is None and settings.bos_id in vocab:
            bos = settings.bos_id
        self._override_bos = settings.add_bos  # None: the file's post-processor decides
        super().__init__(pieces, special, bos, [] if eos is None else [eos], settings)
        self.add_bos = bos is not None and self.encode("")[:1] == [bos]
        keeps_all = kept_by_normalizer(json.loads(blob)) and not any(token.lstrip or token.rstrip for token in added.values())
        self.covers = self.covers * MOST_COMPOSED if keeps_all and self.covers else None

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return self._encode_with(self._parsing if parse_special else self._plain, text, add_special_tokens)

    def _encode_parts(self, parts: Sequence[str], add_special_tokens: bool) -> list[int]:
        """The ids of `parts`. As in the library, a special token removes adjacent spaces if the file says so, and only
        text at the very start gets the space that some vocabularies put in front."""
        ids = self._encode("", add_special_tokens, False) if add_special_tokens else []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._parsing.token_to_id(part))
                continue
            if i and parts[i - 1] in self._strips_right:
                part = part.lstrip()
            if i + 1 < len(parts) and parts[i + 1] in self._strips_left:
                part = part.rstrip()
            if part:
                ids += self._encode_with(self._plain if i == 0 else self._inner, part, False)
        return ids

    def _encode_with(self, tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
        override = self._override_bos if add_special_tokens and self.bos_id is not None else None
        ids = list(tokenizer.encode(text, add_special_tokens=add_special_tokens and override is not False).ids)
        return [self.bos_id, *ids] if override and ids[:1] != [self.bos_id] else ids  # type: ignore[list-item]


def kept_by_normalizer(content: dict[str, Any]) -> bool:
    """Whether every character of a text is in some token: none is dropped, and unknown ones become byte tokens."""
    root = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = root["normalizers"] if root.get("type") == "Sequence" else [root]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    known = all(step.get("type") in ("NFC", "NFD", "Prepend") or step == spaces for step in steps)
    model = content.get("model") or {}
    vocab = model.get("vocab") or {}
    tokens = set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}
    if "ByteLevel" in json.dumps(content.get("pre_tokenizer")):
        return known and tokens >= _byte_level_alphabet().keys()
    all_bytes = {
        f"<0x{byte:02X}>" for byte in range(256)
    }  # if a byte has no token, several characters with that byte become one unknown id
    return known and bool(model.get("byte_fallback")) and tokens >= all_bytes


def _json_pieces(vocab: dict[int, str], added: dict[int, str], content: dict[str, Any], path: Path) -> Pieces:
    """The pieces of a `tokenizer.json` with a byte-level or sentencepiece-like decoder. Raises UserError for others."""
    root = content.get("decoder") or {}
    steps = root["decoders"] if root.get("type") == "Sequence" else [root]
    kinds = [step.get("type") for step in steps]
    size = _checked_size(max(vocab, default=-1))
    raw = [added.get(i, vocab.get(i, "")) for i in range(size)]
    if kinds == ["ByteLevel"]:
        table = _byte_level_alphabet()
        whole = [i in added or any(c not in table for c in token) for i, token in enumerate(raw)]
        return Pieces([t.encode() if w else bytes(table[c] for c in t) for t, w in zip(raw, whole, strict=True)])
    strip = next((step for step in steps if step.get("type") == "Strip"), {"content": " ", "start": 0, "stop": 0})
    plain_strip = strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0
    if not kinds == ["Metaspace"] and not (set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and plain_strip):
        raise UserError(f"{path} has an unsupported decoder {kinds}; use a byte-level or sentencepiece-like one")
    if any(s["pattern"] != {"String": "▁"} or s["content"] != " " for s in steps if s["type"] == "Replace"):
        raise UserError(f"{path} has a decoder that replaces more than ▁; use a byte-level or sentencepiece-like one")
    is_byte = re.compile("<0x[0-9A-F]{2}>").fullmatch
    byte_ids = frozenset(i for i, token in enumerate(raw) if "ByteFallback" in kinds and is_byte(token))
    data = [bytes([int(t[3:5], 16)]) if i in byte_ids else t.replace("▁", " ").encode() for i, t in enumerate(raw)]
    if kinds == ["Metaspace"]:
        lead = "keep" if root.get("prepend_scheme") == "never" else "metaspace"
    else:
        lead = "strip" if strip["start"] else "keep"
    return Pieces(data, byte_ids, stream=False, lead=lead)


def _byte_level_alphabet() -> dict[str, int]:
    """The byte for each of GPT-2's printable characters. Visible Latin-1 characters are their own byte; those from U+0100
    on are the other bytes, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def _added_pieces(first: int, added: Mapping[int, tuple[str, bool]]) -> list[bytes]:
    """The pieces from id `first` on; unused ids between added ones are empty."""
    return [added.get(i, ("", False))[0].encode() for i in range(first, _checked_size(max(added, default=first - 1)))]


def _checked_size(last_id: int) -> int:
    if last_id > MAX_ID:
        raise UserError(f"the tokenizer's files give a token the id {last_id}; download them again")
    return last_id + 1


def _alternatives(texts: Mapping[str, int]) -> re.Pattern[str] | None:
    """A pattern with one group that splits at any of `texts`, longest first; None if there are no texts."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


class ByteTokenizer(Tokenizer):
    """The tokenizer of a model without a vocabulary (a preset with random weights). Ids 0 to 255 are the bytes of
    UTF-8; any other id n decodes to `⟨n⟩ `. There is no BOS and no EOS. Decoding an encoded text returns it unchanged.

    Raises UserError for a vocab_size below 256.
    """

    def __init__(self, vocab_size: int):
        if vocab_size < 256:
            raise UserError(
                f"{vocab_size} ids are too few for the stand-in tokenizer, which needs one for each of the 256 bytes"
            )
        data = [bytes([i]) for i in range(256)] + [f"⟨{i}⟩ ".encode() for i in range(256, vocab_size)]
        super().__init__(Pieces(data), frozenset(), None, [], Settings(templates={"default": PLAIN_CHAT}))

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return list(text.encode())


# ----------------------------------------------------------------------------------------------------- chat templates


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which templates mark a model's answers for training. Here it is replaced by its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=64)
def _compile_template(template: str) -> jinja2.Template:
    """Compile a template with transformers' filters and functions, in a sandbox, because it is untrusted code."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # jinja's own `tojson` escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)


def _plain_message(message: Message) -> dict[str, Any]:
    """A copy without None values, which templates would print, and with reasoning as `reasoning_content` and `thinking`."""
    if not isinstance(message, Mapping):
        raise UserError(f"a chat message is a {type(message).__name__}; pass objects with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _tag_final_message(chat: list[dict[str, Any]], template: str) -> str:
    """Append CONTINUE_TAG to the last message's text, in place in `chat`. Returns that text without the tag."""
    content = chat[-1].get("content")
    if "content" not in template:
        raise UserError("continue_final_message needs a chat template that renders the content of messages")
    if isinstance(content, str):
        chat[-1]["content"] = content + CONTINUE_TAG
        return content
    blocks = [dict(block) for block in content] if isinstance(content, list) else []
    for block in reversed(blocks):
        if isinstance(text := block.get("text"), str):
            block["text"] = text + CONTINUE_TAG
            chat[-1]["content"] = blocks
            return text
    raise UserError("continue_final_message is set but the final message has no text; give it content to continue")


def _cut_after_final_message(text: str, final: str) -> str:
    tag = text.rfind(CONTINUE_TAG.strip())
    if tag < 0 or final.strip() not in text:
        raise UserError("the chat template drops or alters the final message; do not set continue_final_message")
    kept = text[tag:].startswith(CONTINUE_TAG)  # if not, the template strips contents, so the result is stripped, too
    return text[:tag] if kept else text[:tag].rstrip()


# ------------------------------------------------------------------------------------------------------------ loading


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer for a value of `--model`: that of a checkpoint (a folder, or a weights file in it), or a
    `ByteTokenizer` for a preset or a `config.json` alone.

    Raises UserError for a missing or corrupt file, and for a name that is neither a path nor a preset.
    """
    path = Path(model)
    if not path.exists() or is_shape(model):
        return ByteTokenizer(named_config(model).vocab_size)
    return load_tokenizer(path.parent if path.is_file() else path)


def find_tokenizer(path: Path) -> Path | None:
    """The tokenizer's file in a checkpoint folder, or `path` itself if it is a file; None if there is no such file."""
    candidates = [path / name for name in TOKENIZER_NAMES] if path.is_dir() else [path]
    return next((file for file in candidates if file.exists()), None)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint folder (`tokenizer.json`, else `tokenizer.model`) or of such a file.

    Its settings are read from the JSON files in the same folder. Raises UserError for a missing or corrupt file.
    """
    path = Path(path)
    file = find_tokenizer(path)
    if file is None:
        raise UserError(
            f"no tokenizer at {path}: there is neither tokenizer.json nor tokenizer.model; "
            "copy the tokenizer's files of the model that it was made from there"
        )
    blob = read_file(file, TOKENIZER_BYTES)
    if blob.startswith(b"version https://git-lfs"):
        raise UserError(f"{file} is a Git LFS pointer, not the tokenizer; fetch the file itself with git lfs pull")
    settings = _read_settings(file.parent)
    if file.suffix == ".json":
        return HuggingFaceTokenizer(blob, file, settings)
    if re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s", blob):
        return TiktokenTokenizer(blob, file, settings)
    return SentencePieceTokenizer(blob, file, settings)


def _read_settings(folder: Path) -> Settings:
    config = _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "special_tokens_map.json") | config  # the former is older and has less
    settings = Settings(add_bos=config.get("add_bos_token"), legacy=config.get("legacy") is not False)
    for name, value in names.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            settings.names[name] = text
    try:
        for key, token in (config.get("added_tokens_decoder") or {}).items():
            settings.added[int(key)] = (str(token["content"]), bool(token.get("special")))
        settings.templates = dict(_read_templates(folder, config.get("chat_template")))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{folder / 'tokenizer_config.json'} is malformed ({e!r}); download the file again") from e
    bos = _read_json(folder / "config.json").get("bos_token_id")
    settings.bos_id = bos if isinstance(bos, int) else None
    eos: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise UserError(f"{folder / name} has a bad eos_token_id; make it an id or a list of ids")
        eos += ids
    settings.eos_ids = tuple(eos)
    return settings


def _read_templates(folder: Path, in_config: Any) -> Iterator[tuple[str, str]]:
    """Chat templates by name. Files are the newer form; they come last and replace those of `tokenizer_config.json`."""
    if isinstance(in_config, str):
        yield "default", in_config
    for entry in in_config if isinstance(in_config, list) else []:
        yield entry["name"], entry["template"]
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        yield file.stem, _read_text(file)
    if (file := folder / "chat_template.jinja").is_file():
        yield "default", _read_text(file)


def _read_text(path: Path) -> str:
    try:
        return read_file(path, CONFIG_BYTES).decode()
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text; download the file again") from e


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    try:
        return read_json(path, CONFIG_BYTES)
    except FileNotFoundError:
        return {}


def _library(name: str) -> Any:
    """The library for one kind of tokenizer, imported when such a file is read. Raises UserError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise UserError(f"this tokenizer needs the {name} library; install it with: pip install {name}") from e


def _load(path: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except UserError:
        raise
    except Exception as e:  # the libraries raise bare Exception and RuntimeError for a corrupt file
        reason = " ".join(str(e).split())[:120]
        raise UserError(f"{path} cannot be read as a tokenizer ({reason}); download the file again") from e

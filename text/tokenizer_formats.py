"""The three kinds of tokenizer files, each read with its own library: sentencepiece, tiktoken, and `tokenizer.json`."""

import base64
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from errors import UserError, first_line, is_panic
from ranks.bounded import bounded
from text.tokenizer import Added, Pieces, Tokenizer, TokenizerSettings, alternatives

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
# one more step may remove a space at the start
SENTENCEPIECE_DECODERS = (["Replace", "ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Replace"])
MAX_RUN = 25_000  # characters; tiktoken's regex engine fails on longer runs of whitespace; Llama 3's own code cuts here, too
MAX_ID = 1 << 24  # far above any vocabulary; a larger id in a corrupt file would fill the memory with empty pieces
DROPPED = " \u200b\x01\u0301"  # characters that a normalizer may drop
LONGEST = 1 << 16  # characters of a token's text, far above those of any
PROBE = 4096  # characters, far more than the longest token has
MOST_COMPOSED = 4  # most characters that canonical composition turns into one


class SentencePieceTokenizer(Tokenizer):
    """`tokenizer.model` of Llama 2 and Mistral, with the sentencepiece library. Decodes as that library does."""

    def __init__(self, blob: bytes, path: Path, settings: TokenizerSettings):
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
        added, left_out = _placed(settings, {sp.id_to_piece(i): i for i in range(size)})
        added = {i: token for i, token in added.items() if i >= size or not (sp.is_unknown(i) or sp.is_byte(i))}
        for i, token in added.items():
            if i < size and token.content != sp.id_to_piece(i):  # a reserved piece that got another name
                data[i] = token.content.encode()
        data += _added_pieces(size, added)
        special = {i for i in range(size) if sp.is_control(i)} | {i for i, token in added.items() if token.special}
        texts = {data[i].decode(): i for i in sorted({*special, *added})}
        self._ids_of_specials, self._split = texts, alternatives(texts)
        pieces = Pieces(data, byte_ids, stream=False, lead=self._probe_lead(size))
        bos = texts.get(settings.names.get("bos_token", ""), sp.bos_id())
        eos = texts.get(settings.names.get("eos_token", ""), sp.eos_id())
        super().__init__(pieces, frozenset(special), None if bos < 0 else bos, [eos] if eos >= 0 else [], settings)
        self.remarks += left_out
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
        return self._encode_parts(self._split.split(text) if parse_special else [text], add_special_tokens)

    def _ids_of_parts(self, parts: Sequence[str]) -> list[int]:
        ids = list[int]()
        for i, part in enumerate(parts):  # even index: plain text; odd: a special token
            if i % 2:
                ids.append(self._ids_of_specials[part])
            elif part:
                ids += (self._sp if self._legacy or i == 0 else self._bare).encode(part)
        return ids


class TiktokenTokenizer(Tokenizer):
    """Llama 3's `tokenizer.model`, with the tiktoken library. Each line has a base64 token and its rank, which is its id.
    256 special tokens have the ids after the last rank."""

    def __init__(self, blob: bytes, path: Path, settings: TokenizerSettings):
        try:
            lines = [line.split() for line in blob.splitlines() if line.strip()]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except ValueError as e:
            raise UserError(f"{path} has a line that is not a base64 token and a rank; download the file again") from e
        if sorted(ranks.values()) != list(range(len(lines))) or any(bytes([i]) not in ranks for i in range(256)):
            raise UserError(f"{path} lacks ranks or single bytes; download the file again")
        names = dict(enumerate(LLAMA3_SPECIALS, len(ranks)))
        added, left_out = _placed(settings, {text: i for i, text in names.items()})
        names |= {i: token.content for i, token in added.items() if i >= len(ranks)}  # Llama 3.0 has other names
        specials = {text: i for i, text in names.items()}
        self._encoding = _library("tiktoken").Encoding(
            name=str(path), pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        data = sorted(ranks, key=ranks.__getitem__) + _added_pieces(
            len(ranks), {i: Added(name, True) for i, name in names.items()}
        )
        bos = specials.get(settings.names.get("bos_token", "<|begin_of_text|>"))
        ends = [settings.names.get("eos_token", ""), "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
        eos = [specials[end] for end in ends if end in specials]
        super().__init__(Pieces(data), frozenset(names), bos, eos, settings)
        self.remarks += left_out

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        ids = list(self._before) if add_special_tokens else []
        allowed: Any = "all" if parse_special else set()
        for part in _cut_long_runs(text):
            ids += self._encoding.encode(part, allowed_special=allowed, disallowed_special=())
        return ids + (self._after if add_special_tokens else [])


def _cut_long_runs(text: str) -> Iterator[str]:
    """Split `text` only inside runs of more than MAX_RUN characters that are all whitespace or all not whitespace."""
    start = 0
    for run in re.finditer(rf"\s{{1,{MAX_RUN}}}|\S{{1,{MAX_RUN}}}", text) if len(text) > MAX_RUN else ():
        if len(run[0]) == MAX_RUN:
            yield text[start : run.end()]
            start = run.end()
    yield text[start:]


class HuggingFaceTokenizer(Tokenizer):
    """`tokenizer.json` with the tokenizers library. The file's post-processor decides which special tokens surround a text."""

    def __init__(self, blob: bytes, content: dict[str, Any], path: Path, settings: TokenizerSettings):
        library = _library("tokenizers")
        self._parsing = _load(path, lambda: library.Tokenizer.from_str(blob.decode()))
        self._plain = _load(path, lambda: library.Tokenizer.from_str(blob.decode()))
        inner = re.sub(rb'("prepend_scheme"\s*:\s*)"first"', rb'\1"never"', blob)  # for text after a special token
        self._inner = _load(path, lambda: library.Tokenizer.from_str(inner.decode())) if inner != blob else self._plain
        for tokenizer in (self._plain, self._inner):
            tokenizer.encode_special_tokens = True  # a setting, not an argument: threads that change it would conflict
        given, left_out = _placed(settings, self._parsing.get_vocab(with_added_tokens=True))
        tokens = [library.AddedToken(token.content, special=token.special, **token.flags) for _, token in sorted(given.items())]
        for tokenizer in (self._parsing, self._plain, *([] if self._inner is self._plain else [self._inner])):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.add_tokens(tokens)
        for id, token in given.items():
            if (found := self._parsing.token_to_id(token.content)) != id:
                raise UserError(
                    f"{path.parent} gives the token {token.content!r} the id {id}, but with {path.name} it is {found}; "
                    "take all of the tokenizer's files from one release of the model"
                )
        added = self._parsing.get_added_tokens_decoder()
        special = {token["content"] for token in content.get("added_tokens") or [] if token.get("special")}
        special |= {token.content for token in added.values() if token.special}  # the library forgets none
        self._strips_left = {token.content for token in added.values() if token.lstrip}
        self._strips_right = {token.content for token in added.values() if token.rstrip}
        vocab = {i: token for token, i in self._parsing.get_vocab(with_added_tokens=True).items()}
        pieces = _json_pieces(vocab, {i: token.content for i, token in added.items()}, content, self._parsing, path)
        bos, eos = (self._parsing.token_to_id(settings.names.get(name, "")) for name in ("bos_token", "eos_token"))
        if bos is None and settings.bos_id in vocab:
            bos = settings.bos_id
        ids = frozenset(i for i, token in added.items() if token.content in special)
        super().__init__(pieces, ids, bos, [] if eos is None else [eos], settings)
        self._before, self._after = bounded(str(path), self._special_tokens)
        self.add_bos = bos is not None and self._before[:1] == [bos]
        self.remarks += left_out
        if (settings.add_bos is not None and settings.add_bos != self.add_bos) or (
            settings.add_eos is not None and settings.add_eos != bool(self._after)
        ):
            self.remarks.append(
                f"add_bos_token and add_eos_token do not count beside {path.name}, whose post-processor decides"
            )
        keeps_all = kept_by_normalizer(content) and not any(token.lstrip or token.rstrip for token in added.values())
        self.covers = self.covers * MOST_COMPOSED if keeps_all and self.covers and self.has_exact_bytes else None

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Those that the file puts before and after a text."""
        encoding = call_library(self._parsing.encode, "a")
        mask = [bool(own) for own in encoding.special_tokens_mask]
        if False not in mask:
            return [], encoding.ids
        return encoding.ids[: mask.index(False)], encoding.ids[len(mask) - mask[::-1].index(False) :]

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        tokenizer = self._parsing if parse_special else self._plain
        return list(call_library(tokenizer.encode, text, None, False, add_special_tokens).ids)

    def _ids_of_parts(self, parts: Sequence[str]) -> list[int]:
        """As in the library, a special token removes adjacent spaces if the file says so, and only text at the very start gets the
        space that some vocabularies put in front."""
        ids = list[int]()
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._parsing.token_to_id(part))
                continue
            if i and parts[i - 1] in self._strips_right:
                part = part.lstrip()
            if i + 1 < len(parts) and parts[i + 1] in self._strips_left:
                part = part.rstrip()
            if part:
                ids += call_library((self._plain if i == 0 else self._inner).encode, part, None, False, False).ids
        return ids


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
    # if a byte has no token, several characters with that byte become one unknown id
    all_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
    return known and bool(model.get("byte_fallback")) and tokens >= all_bytes


def _json_pieces(vocab: dict[int, str], added: dict[int, str], content: dict[str, Any], library: Any, path: Path) -> Pieces:
    """The table for a byte-level or sentencepiece-like decoder; else the library's `decode`. Raises UserError for a decoder whose text
    for some ids need not begin with its text for fewer, so that no answer could be streamed."""
    root = content.get("decoder") or {}
    steps = root["decoders"] if root.get("type") == "Sequence" else [root]
    kinds = [step.get("type") for step in steps]
    size = _checked_size(max(vocab, default=-1))
    raw = [added.get(i, vocab.get(i, "")) for i in range(size)]
    is_byte = re.compile("<0x[0-9A-F]{2}>").fullmatch
    byte_ids = frozenset(i for i, token in enumerate(raw) if "ByteFallback" in kinds and is_byte(token))
    plain = all(s["pattern"] == {"String": "▁"} and s["content"] == " " for s in steps if s.get("type") == "Replace")
    table = _byte_level_alphabet()
    whole = [i in added or any(c not in table for c in token) for i, token in enumerate(raw)]
    if kinds == ["ByteLevel"] or (
        # as transformers converts a GGUF file: without such pieces, all steps but the last do nothing
        kinds == ["ByteFallback", "Fuse", "Replace", "ByteLevel"]
        and plain
        and not byte_ids
        and not any(w and i not in added for i, w in enumerate(whole))
    ):
        return Pieces([t.encode() if w else bytes(table[c] for c in t) for t, w in zip(raw, whole, strict=True)])
    strip = {"content": " ", "start": 0, "stop": 0} | (steps[-1] if kinds[-1:] == ["Strip"] else {})
    plain &= strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0
    lead = "strip" if strip["start"] else "keep"
    if kinds == ["Metaspace"]:
        lead = "keep" if root.get("prepend_scheme") == "never" else "metaspace"
        # the first token loses each ▁, but no space
        plain = root.get("replacement") == "▁" and not (lead == "metaspace" and any(" " in token for token in raw))
    if plain and (kinds == ["Metaspace"] or (kinds[:-1] if strip["start"] else kinds) in SENTENCEPIECE_DECODERS):
        data = [bytes([int(t[3:5], 16)]) if i in byte_ids else t.replace("▁", " ").encode() for i, t in enumerate(raw)]
        return Pieces(data, byte_ids, stream=False, lead=lead)

    for step in steps[kinds.index("Fuse") :] if "Fuse" in kinds else ():
        if step.get("type") == "Replace" and len(step["pattern"].get("String", "")) != 1:
            raise UserError(
                f"the tokenizer's decoder replaces {step['pattern']} in a whole text, which cannot be streamed; use another one"
            )

    def decode(ids: Sequence[int]) -> str:
        return str(call_library(library.decode, list(ids), False)) if ids else ""

    data = bounded(str(path), _shown, raw, added, decode, characters=sum(map(len, raw)))
    return Pieces(data, byte_ids, decode=decode)


def _shown(raw: list[str], added: Mapping[int, str], decode: Callable[[Sequence[int]], str]) -> list[bytes]:
    """What the library adds to a text for each id, for display. Raises UserError if it fails for one, or makes a long text of it."""
    alone = list[str]()
    for i in range(len(raw)):
        alone.append(decode([i]))
        if len(alone[-1]) > LONGEST:
            raise UserError(f"the tokenizer's decoder makes more than {LONGEST} characters of a token; use another tokenizer")
    word = next((i for i, text in enumerate(alone) if i not in added and text.isalnum()), None)
    start = "" if word is None else alone[word]
    after = alone if word is None else [decode([word, i]) for i in range(len(raw))]
    texts = [text[len(start) :] if text.startswith(start) else "" for text in after]
    return [(token if i in added else texts[i] or alone[i] or token).encode() for i, token in enumerate(raw)]


def _byte_level_alphabet() -> dict[str, int]:
    """The byte for each of GPT-2's printable characters. Visible Latin-1 characters are their own byte; those from U+0100
    on are the other bytes, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def _placed(settings: TokenizerSettings, vocab: Mapping[str, int]) -> tuple[dict[int, Added], list[str]]:
    """The added tokens by id, and remarks about those without an embedding, which are left out. vocab: the ids that tokens have."""
    found, left_out = dict[int, Added](), list[str]()
    ids = dict(vocab)
    free = 1 + max([*ids.values(), *(token.id for token in settings.added if token.id is not None)], default=-1)
    for token in filter(lambda token: token.content, settings.added):
        id = ids.get(token.content, free) if token.id is None else token.id
        if settings.vocab_size is not None and id >= settings.vocab_size and token.content not in vocab:
            left_out.append(token.content)
            continue
        if id not in found or token.flags:  # one that is named again by its text alone keeps its flags
            found[id], ids[token.content] = token, id
        free = max(free, id + 1)
    names = ", ".join(map(repr, left_out[:5]))
    return found, [f"{len(left_out)} added tokens have no embedding and are left out: {names}"] if left_out else []


def _added_pieces(first: int, added: Mapping[int, Added]) -> list[bytes]:
    """The pieces from id `first` on; unused ids between added ones are empty."""
    last = _checked_size(max(added, default=first - 1))
    return [added[i].content.encode() if i in added else b"" for i in range(first, last)]


def _checked_size(last_id: int) -> int:
    if last_id > MAX_ID:
        raise UserError(f"the tokenizer's files give a token the id {last_id}; download them again")
    return last_id + 1


def call_library(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the tokenizers library. Raises UserError if it panics: that exception is no `Exception`, so whatever else
    catches errors would pass it on."""
    try:
        return function(*arguments)
    except BaseException as e:
        if not is_panic(e):
            raise
        raise UserError(f"the tokenizers library failed ({first_line(e)}); send another text, or mend the tokenizer") from None


def _library(name: str) -> Any:
    """The library for one kind of tokenizer, imported when such a file is read. Raises UserError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise UserError(f"this tokenizer needs the {name} library; install it with: pip install {name}") from e


def parse_json(blob: bytes, path: Path) -> dict[str, Any]:
    """The content of a `tokenizer.json`. Raises UserError."""
    content: dict[str, Any] = _load(path, lambda: dict(json.loads(blob)))
    return content


def _load(path: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except UserError:
        raise
    except Exception as e:  # the libraries raise bare Exception and RuntimeError for a corrupt file
        reason = " ".join(str(e).split())[:120]
        raise UserError(f"{path} cannot be read as a tokenizer ({reason}); download the file again") from e

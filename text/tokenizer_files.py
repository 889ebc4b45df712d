"""Loads the tokenizer of a checkpoint, with its settings from the JSON files in the same folder."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints.presets import has_random_weights, named_config
from errors import UserError
from files import CONFIG_BYTES, TOKENIZER_BYTES, model_folder, read_file, read_json
from text.tokenizer import Added, ByteTokenizer, Tokenizer, TokenizerSettings
from text.tokenizer_formats import HuggingFaceTokenizer, SentencePieceTokenizer, TiktokenTokenizer, parse_json

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of an added token
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model")  # the first one that exists is used


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer for a value of `--model`: that of a checkpoint (a folder, or a weights file in it), or a
    `ByteTokenizer` for a preset or a `config.json` alone.

    Raises UserError for a missing or corrupt file, and for a name that is neither a path nor a preset.
    """
    config = named_config(model)  # which says what is wrong with the model itself
    return ByteTokenizer(config.vocab_size) if has_random_weights(model) else load_tokenizer(model_folder(model))


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
    content = parse_json(blob, file) if file.suffix == ".json" else None
    settings = _read_settings(file.parent, content)
    if content is not None:
        tokenizer: Tokenizer = HuggingFaceTokenizer(blob, content, file, settings)
    elif re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s", blob):
        tokenizer = TiktokenTokenizer(blob, file, settings)
    else:
        tokenizer = SentencePieceTokenizer(blob, file, settings)
    _check_ends(tokenizer, file, settings)
    return tokenizer


def _check_ends(tokenizer: Tokenizer, file: Path, settings: TokenizerSettings) -> None:
    """Raises UserError for an end of generation that the model can never draw, because it is no token."""
    data = tokenizer.pieces.data
    for id in settings.eos_ids:
        if id >= len(data) or not data[id]:
            raise UserError(
                f"eos_token_id {id} of {file.parent} is no token of {file.name}, so no answer could end with it; mend eos_token_id in "
                "config.json and generation_config.json, or add the token's file (added_tokens.json, tokenizer_config.json)"
            )
    if (name := settings.names.get("eos_token")) and not tokenizer.eos_ids:
        raise UserError(
            f"eos_token {name!r} of {file.parent} is no token of {file.name}, so no answer could end with it; mend eos_token in "
            "tokenizer_config.json"
        )


def _read_settings(folder: Path, content: dict[str, Any] | None) -> TokenizerSettings:
    """content: of `tokenizer.json`."""
    config, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
    text = model.get("text_config")  # of a multimodal model
    model = text | {key: value for key, value in model.items() if value is not None} if isinstance(text, dict) else model
    settings = TokenizerSettings(add_bos=config.get("add_bos_token"), add_eos=config.get("add_eos_token"))
    settings.legacy = config.get("legacy") is not False
    size, bos = model.get("vocab_size"), model.get("bos_token_id")
    settings.vocab_size = size if isinstance(size, int) else None
    settings.bos_id = bos if isinstance(bos, int) else None
    try:
        _read_added(settings, folder, config, [] if content is None else content.get("added_tokens") or [])
        settings.templates = dict(_read_templates(folder, config.get("chat_template")))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{folder / 'tokenizer_config.json'} is malformed ({e!r}); download the file again") from e
    eos: list[int] = []
    for name, holder in (("generation_config.json", _read_json(folder / "generation_config.json")), ("config.json", model)):
        ids = holder.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise UserError(f"{folder / name} has a bad eos_token_id; make it an id or a list of ids")
        eos += ids
    settings.eos_ids = tuple(eos)
    return settings


def _read_added(settings: TokenizerSettings, folder: Path, config: Mapping[str, Any], own: Iterable[Mapping[str, Any]]) -> None:
    """Set `names` and `added` as transformers 5 does (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend.__init__`): with
    `added_tokens_decoder`, `special_tokens_map.json` and `added_tokens.json` do not count. A token of `added_tokens.json` is also special
    if `special_tokens_map.json` lists it without a name. own: the added tokens of `tokenizer.json`."""
    values, tokens = dict(config), dict[int, Added]()
    named, extra = _extra(config)
    known = {token["content"] for token in own}
    if config.get("added_tokens_decoder") is not None:
        tokens = {int(key): _added(token) for key, token in config["added_tokens_decoder"].items()}
    else:
        older = _read_json(folder / "special_tokens_map.json")
        values |= older
        more_named, more = _extra(older)
        named, extra = named | more_named, [*extra, *(token for token in more if token not in extra)]
        special = {_added(values[name]).content for name in NAMED if values.get(name)} | {token.content for token in extra}
        for text, id in _read_json(folder / "added_tokens.json").items():
            tokens[int(id)] = Added(text, text in special)
        tokens |= {int(token["id"]): _added(token) for token in own}
    known |= {token.content for token in tokens.values()}
    in_order = dict.fromkeys((*NAMED, *(name for name in values if name.endswith("_token"))))
    named = {name: _added(values[name]) for name in in_order if isinstance(values.get(name), (str, dict))} | named
    settings.names = {name: token.content for name, token in named.items()}
    settings.added = [replace(token, id=id) for id, token in sorted(tokens.items())]
    settings.added += [token for token in (*named.values(), *extra) if token.content not in known]
    for token in settings.added:
        token.special |= token.content in settings.names.values()


def _extra(values: Mapping[str, Any]) -> tuple[dict[str, Added], list[Added]]:
    """Further special tokens, with names or without."""
    found = values.get("extra_special_tokens") or {}
    named, listed = (found, values.get("additional_special_tokens") or []) if isinstance(found, dict) else ({}, found)
    return {name: _added(value, True) for name, value in named.items()}, [_added(value, True) for value in listed]


def _added(value: Any, special: bool = False) -> Added:
    """A token as the JSON files write it: its text, if it is special, or an object. special: if the object does not say so."""
    if isinstance(value, str):
        return Added(value, True)
    flags = {name: bool(value[name]) for name in FLAGS if name in value}
    return Added(str(value["content"]), bool(value.get("special", special)), flags=flags)


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

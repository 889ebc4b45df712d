"""Loads the tokenizer of a checkpoint, with its settings from the JSON files in the same folder."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from errors import UserError
from files import CONFIG_BYTES, TOKENIZER_BYTES, model_folder, read_file, read_json
from presets import is_shape, named_config
from tokenizer import ByteTokenizer, Tokenizer, TokenizerSettings
from tokenizer_formats import HuggingFaceTokenizer, SentencePieceTokenizer, TiktokenTokenizer

TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model")  # the first one that exists is used


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer for a value of `--model`: that of a checkpoint (a folder, or a weights file in it), or a
    `ByteTokenizer` for a preset or a `config.json` alone.

    Raises UserError for a missing or corrupt file, and for a name that is neither a path nor a preset.
    """
    if not Path(model).exists() or is_shape(model):
        return ByteTokenizer(named_config(model).vocab_size)
    return load_tokenizer(model_folder(model))


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


def _read_settings(folder: Path) -> TokenizerSettings:
    config = _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "special_tokens_map.json") | config  # the former is older and has less
    settings = TokenizerSettings(add_bos=config.get("add_bos_token"), legacy=config.get("legacy") is not False)
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

"""Read how sentence-transformers makes an embedding with a checkpoint."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from engine.protocol import Pooling
from errors import UserError
from files import CONFIG_BYTES, count, model_folder, read_file, read_json

POOLINGS: dict[str, Pooling] = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
SETTINGS = "sentence_bert_config.json"
OWN = "sentence_transformers."  # beginning of a module's type: other ones are programs of the checkpoint
ADVICE = "--embedding-pooling mean or last serves the model all the same"


class Embedder(NamedTuple):
    """`prompt`: in front of each text. `normalize`: whether vectors are scaled to length 1. `longest`: the most tokens of a text; None:
    those of the context."""

    pooling: Pooling = "mean"
    prompt: str = ""
    normalize: bool = True
    longest: int | None = None


def checkpoint_embedder(model: str, pooling: Pooling | None = None) -> Embedder:
    """What the checkpoint at path `model` was trained for, as sentence-transformers writes it; the defaults if it does not say so.

    pooling: replaces that of the files. Raises UserError for files that cannot be read, and, without `pooling`, for steps that are not
    computed here.
    """
    folder = model_folder(model)
    modules, longest = _modules(folder), None
    try:
        settings = _read(folder / SETTINGS)
        if settings.get("max_seq_length") is not None:
            longest = count(settings, "max_seq_length")
        if modules is not None and (
            unknown := [one for one in modules if one[0] not in ("Transformer", "Pooling", "Normalize")]
        ):
            raise UserError(f"{folder / 'modules.json'} has modules that are not computed here ({unknown[0][0]}); {ADVICE}")
        if settings.get("do_lower_case"):
            raise UserError(f"{folder / SETTINGS} has do_lower_case, which is not computed here; {ADVICE}")
        prompt = _prompt(folder / "config_sentence_transformers.json")
        places = [path for kind, path in modules or () if kind == "Pooling"] or ["1_Pooling"]
        found = _pooling(folder, folder / places[0] / "config.json", bool(prompt))
    except UserError as e:
        if pooling is None:
            raise
        logging.getLogger("rung").warning("%s", e)
        found, prompt = pooling, ""
    normalize = modules is None or any(kind == "Normalize" for kind, _ in modules)
    return Embedder(pooling or found, prompt, normalize, longest)


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """The kind and the folder of each module; None without a list of them."""
    try:
        found = list[tuple[str, str]]()
        for module in json.loads(read_file(folder / "modules.json", CONFIG_BYTES)):
            kind = str(module["type"])
            found.append((kind.rpartition(".")[2] if kind.startswith(OWN) else kind, str(module.get("path", ""))))
        return found
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as e:
        raise UserError(f"{folder / 'modules.json'} is malformed ({e!r}); download the file again") from e


def _prompt(file: Path) -> str:
    config = _read(file)
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise UserError(f"{file} has no prompt {name!r}, its default_prompt_name; mend the file")
    return str(prompts[name])


def _pooling(folder: Path, file: Path, prompt: bool) -> Pooling:
    config = _read(file, folder)
    modes = [
        name.removeprefix("pooling_mode_") for name, on in config.items() if on is True and name.startswith("pooling_mode_")
    ]
    given = config.get("pooling_mode") or modes or ["mean"]
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) != 1 or given[0] not in POOLINGS:
        raise UserError(f"{file} has a pooling that is not computed here ({given!r}); {ADVICE}")
    if prompt and config.get("include_prompt") is False:
        raise UserError(f"{file} leaves a prompt's tokens out, which is not computed here; {ADVICE}")
    return POOLINGS[given[0]]


def _read(file: Path, within: Path | None = None) -> dict[str, Any]:
    try:
        return read_json(file, CONFIG_BYTES, within)
    except FileNotFoundError:
        return {}

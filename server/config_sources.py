"""Read settings from the environment and from a file, as if they were arguments of the command line."""

import argparse
import importlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import UserError

ENV_PREFIX = "RUNG_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.dest not in ("help", "version")}


def _arguments(action: argparse.Action, value: Any, source: str) -> list[str]:
    """Convert `value`, from a file or the environment, to command-line arguments. Raises UserError, which names `source`."""
    if isinstance(action, argparse.BooleanOptionalAction):
        word = str(value).strip().lower()
        if word not in TRUE + FALSE:
            raise UserError(f"{source} is {value!r}; use true or false")
        return [action.option_strings[0 if word in TRUE else 1]]
    values = value if isinstance(value, list) else [value]
    if len(values) != 1 and not isinstance(action, argparse._AppendAction):
        raise UserError(f"{source} is a list; give one value")
    if any(isinstance(v, (dict, list, bool)) or v is None for v in values):
        raise UserError(f"{source} is {value!r}; give a string or a number")
    return [f"{action.option_strings[0]}={v}" for v in values]


def _parse_one(parser: argparse.ArgumentParser, arguments: list[str], source: str) -> dict[str, Any]:
    try:
        return vars(parser.parse_args(arguments))
    except UserError as e:
        raise UserError(f"{source}: {e}") from e


def parse_environment(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, action in _flags(parser).items():
        variable = ENV_PREFIX + name.upper()
        value: Any = environ.get(variable, "")
        if value:
            if isinstance(action, argparse._AppendAction):
                value = [part.strip() for part in value.split(",") if part.strip()]
            found |= _parse_one(parser, _arguments(action, value, variable), variable)
    return found


def parse_file(parser: argparse.ArgumentParser, name: str) -> dict[str, Any]:
    content = _read_config(Path(name))
    flags, found = _flags(parser), dict[str, Any]()
    for key, value in content.items():
        action = flags.get(key.replace("-", "_"))
        if action is None or action.dest == "config":
            raise UserError(f"{name} has an unknown key {key!r}; the keys are the flags that --help lists, without --")
        source = f"{key} in {name}"
        found |= _parse_one(parser, _arguments(action, value, source), source)
    return found


def _read_config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            content = importlib.import_module("yaml").safe_load(text) or {}
        elif path.suffix == ".json":
            content = json.loads(text)
        else:
            raise UserError(f"--config {path} is neither .toml, .json nor .yaml; rename it")
    except OSError as e:
        raise UserError(f"cannot read --config {path}: {e.strerror}") from e
    except ImportError as e:
        raise UserError("a YAML --config needs PyYAML; pip install pyyaml, or write it in TOML") from e
    except UserError:
        raise
    except Exception as e:  # each library has its own exception for a syntax error
        raise UserError(f"--config {path} cannot be parsed: {' '.join(str(e).split())[:160]}") from e
    if not isinstance(content, dict):
        raise UserError(f"--config {path} is not a table of keys and values")
    return {str(key): value for key, value in content.items()}

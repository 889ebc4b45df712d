"""The settings of the server. Each is a flag, an environment variable `RUNG_…` and a key of the `--config` file.

The order of precedence is: command line, environment, file, default. A list replaces the lists from sources of lower
precedence; lists are not merged.
"""

import argparse
import importlib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from config import has_random_weights
from errors import UserError
from flags import Parser

ENV_PREFIX = "RUNG_"
VERSION = "0.1.0"
MEMORY_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True)
class Settings:
    """All settings, already checked. Made by `load_settings`; tests may construct it directly."""

    # the model
    model: str = ""
    served_model_name: tuple[str, ...] = ()
    tp: int | None = None  # None: as many ranks as a launcher started, or one
    variant: str | None = None
    dtype: str | None = None
    device: str | None = None
    comm: str | None = None
    comm_error_budget: float = 0.0
    simulate_link: str | None = None
    compile: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    parse_control_tokens: bool = False
    # batching
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batch_tokens: int = 2048
    block_size: int = 16
    kv_memory: float | None = None  # up to 1: a share of the free memory; above 1: bytes
    # HTTP
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    protect_metrics: bool = False
    cors_origin: tuple[str, ...] = ()
    trusted_proxy: tuple[str, ...] = ()
    strict_requests: bool = False
    # limits
    max_queue: int = 1024
    request_timeout: float = 600.0
    idle_timeout: float = 30.0
    drain_timeout: float = 30.0
    max_body_mb: float = 16.0
    workers: int = 2
    worker_seconds: float = 10.0
    # logs
    log_format: str = "text"
    log_level: str = "info"

    @property
    def random_weights(self) -> bool:
        """Whether `model` is a preset, or a config.json without weights."""
        return has_random_weights(self.model)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; the first one appears in answers."""
        return self.served_model_name or (Path(self.model).name or self.model,)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)


def load_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the command line, the environment and the `--config` file. Raises UserError for an invalid one."""
    environ = os.environ if environ is None else environ
    parser = build_parser()
    given = vars(parser.parse_args(argv))
    from_env = _parse_env(parser, environ)
    config = given.pop("config", None) or from_env.pop("config", None)
    from_file = _parse_file(parser, config) if config else {}
    from_env.pop("config", None)
    merged = {**from_file, **from_env, **given}
    merged = {name: tuple(value) if isinstance(value, list) else value for name, value in merged.items()}
    if not merged.get("model"):
        raise UserError("no model; pass --model DIR (or set RUNG_MODEL), for example --model models/tiny-hybrid")
    return _with_key_file(Settings(**merged))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m server",
        description="Serve a checkpoint over an OpenAI-compatible HTTP API.",
        epilog="Each flag may also be an environment variable (--max-num-seqs: RUNG_MAX_NUM_SEQS; lists are separated by commas) "
        "or a key of the --config file (max-num-seqs). The command line wins over the environment, that over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, JSON or YAML; keys are the flags without --")
    parser.add_argument("--version", action="version", version=f"rung {VERSION}")
    _add_model(parser.add_argument_group("the model"))
    _add_batching(parser.add_argument_group("how much at once"))
    _add_http(parser.add_argument_group("HTTP"))
    _add_limits(parser.add_argument_group("limits"))
    _add_logs(parser.add_argument_group("logs"))
    return parser


def _add_model(group: Any) -> None:
    group.add_argument(
        "--model",
        metavar="DIR|PRESET",
        help="a checkpoint directory, HF safetensors or gpt-fast's model.pth; or, for benchmarks, a preset such as llama-3-70b "
        "or a config.json alone, whose weights are random and whose text is noise; required",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; may be repeated, the first one appears in answers (default: the directory's name)",
    )
    group.add_argument(
        "--tp",
        type=_positive,
        metavar="N",
        help="start N tensor-parallel ranks on this host, a GPU each if there are any (default: one; under torchrun, its number)",
    )
    group.add_argument(
        "--variant", help="another residual variant than the checkpoint's. For benchmarks: the text will be wrong"
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations (default: bfloat16 on CUDA, float32 on CPU)",
    )
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    group.add_argument(
        "--comm",
        metavar="NAME",
        help="how ranks sum: gloo; nccl, one-shot, two-shot, fused; int8, int6, int4, fp8, with an optional group as in int8:64; "
        "or auto, the fastest of the exact ones (default: auto on CUDA, gloo on CPU)",
    )
    group.add_argument(
        "--comm-error-budget",
        type=float,
        metavar="E",
        help="relative error of a sum that --comm auto may make for speed, by quantizing it: 0.01 admits int8 (default: 0, exact)",
    )
    group.add_argument(
        "--simulate-link",
        metavar="LATENCY,BANDWIDTH",
        help="on CPU, let sums take as long as such a link would need: 10us,100GB/s",
    )
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the modules with torch.compile; sums are then not fused with GEMMs (default: off)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE|NAME", help="a Jinja file, or the name of one of the checkpoint's (default: its own)"
    )
    group.add_argument(
        "--parse-control-tokens",
        action=argparse.BooleanOptionalAction,
        help="read control tokens such as <|end|> in messages as those tokens, as transformers does; a message can then forge other "
        "turns (default: they are text, and only the chat template writes control tokens)",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        help="render the chat_template of a request. It is a program: it runs in a sandbox in a process with limits, but such programs "
        "can still keep those processes busy (default: refused with a 400)",
    )


def _add_batching(group: Any) -> None:
    group.add_argument(
        "--max-model-len",
        type=_positive,
        metavar="N",
        help="tokens, prompt and answer together (default: what the model allows)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=_positive,
        metavar="N",
        help="sequences that share a step; more give more tokens/s and a slower stream for each (default: 64)",
    )
    group.add_argument(
        "--max-batch-tokens",
        type=_positive,
        metavar="N",
        help="tokens a step; long prompts are cut into parts of this size, so a smaller one keeps streams smooth (default: 2048)",
    )
    group.add_argument(
        "--block-size", type=_positive, metavar="N", help="tokens in a block of the KV cache, the unit of reuse (default: 16)"
    )
    group.add_argument(
        "--kv-memory",
        type=_memory,
        metavar="SIZE",
        help="for the KV cache on each rank: bytes such as 2G or 512M, or a share of the free memory such as 0.9 "
        "(default: the engine decides)",
    )


def _add_http(group: Any) -> None:
    group.add_argument(
        "--host", help="address to listen on; 0.0.0.0 lets other machines in: set --api-key then (default: 127.0.0.1)"
    )
    group.add_argument("--port", type=_port, metavar="N", help="port to listen on; 0 picks a free one (default: 8000)")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="clients must send it as a bearer token; may be repeated. Visible to all users of this machine in its process list: "
        "prefer RUNG_API_KEY or --api-key-file",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys, one a line; lines that start with # are comments"
    )
    group.add_argument(
        "--protect-metrics", action=argparse.BooleanOptionalAction, help="/metrics and /stats need the key, too (default: open)"
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let pages from this origin call the API, such as https://chat.example.org, or * for all; may be repeated (default: none)",
    )
    group.add_argument(
        "--trusted-proxy",
        action="append",
        type=_network,
        metavar="ADDRESS",
        help="believe the X-Forwarded-For of connections from this address or network, such as 127.0.0.1 or 10.0.0.0/8, and write it "
        "to the access log as the client; may be repeated (default: none, whose log has the connection's own address)",
    )
    group.add_argument(
        "--strict-requests",
        action=argparse.BooleanOptionalAction,
        help="refuse requests with unknown parameters (default: ignore them, and name them in the header X-Rung-Ignored and the log)",
    )


def _add_limits(group: Any) -> None:
    group.add_argument(
        "--max-queue",
        type=_not_negative,
        metavar="N",
        help="sequences that may wait beyond --max-num-seqs; then clients get 429 and Retry-After (default: 1024)",
    )
    group.add_argument(
        "--request-timeout", type=_seconds, metavar="S", help="longest time for one request, in seconds (default: 600)"
    )
    group.add_argument(
        "--idle-timeout",
        type=_seconds,
        metavar="S",
        help="a connection that sends no request, or reads no answer, for so long is closed (default: 30)",
    )
    group.add_argument(
        "--drain-timeout", type=_seconds, metavar="S", help="after SIGTERM, how long running requests may go on (default: 30)"
    )
    group.add_argument("--max-body-mb", type=_seconds, metavar="MIB", help="largest request body; above it 413 (default: 16)")
    group.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        help="processes beside the frontend for chat templates, long texts, schemas and large bodies; with two or more, one of them "
        "is kept for short jobs (default: 2)",
    )
    group.add_argument(
        "--worker-seconds",
        type=_seconds,
        metavar="S",
        help="longest time to prepare one request in such a process, which is killed then (default: 10)",
    )


def _add_logs(group: Any) -> None:
    group.add_argument("--log-format", choices=("text", "json"), help="of the access log, one line a request (default: text)")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="warning hides the access log (default: info)"
    )


# --------------------------------------------------------------------------------------------------- values and sources


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _not_negative(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _port(text: str) -> int:
    if not 0 <= (value := int(text)) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 65535")
    return value


def _network(text: str) -> str:
    """Parse an address or a network. Returns it as the module ipaddress writes it."""
    try:
        network = ipaddress.ip_network(text.strip())
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text} is not an address or a network such as 10.0.0.0/8 ({e})") from e
    return str(network.network_address) if network.num_addresses == 1 else str(network)


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _memory(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match or not (value := float(match[1]) * MEMORY_UNITS[match[2]]):
        raise argparse.ArgumentTypeError(f"{text} is neither bytes such as 2G nor a share such as 0.9")
    return value


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.dest not in ("help", "version")}


def _arguments(action: argparse.Action, value: Any, source: str) -> list[str]:
    """Convert `value`, from a file or the environment, to command-line arguments. Raises UserError, which names `source`."""
    if isinstance(action, argparse.BooleanOptionalAction):
        word = str(value).strip().lower()
        if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise UserError(f"{source} is {value!r}; use true or false")
        return [action.option_strings[0 if word in ("1", "true", "yes", "on") else 1]]
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


def _parse_env(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, action in _flags(parser).items():
        variable = ENV_PREFIX + name.upper()
        value: Any = environ.get(variable, "")
        if value:
            if isinstance(action, argparse._AppendAction):
                value = [part.strip() for part in value.split(",") if part.strip()]
            found |= _parse_one(parser, _arguments(action, value, variable), variable)
    return found


def _parse_file(parser: argparse.ArgumentParser, name: str) -> dict[str, Any]:
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


def _with_key_file(settings: Settings) -> Settings:
    keys = settings.api_key
    if settings.api_key_file:
        try:
            lines = [line.strip() for line in settings.api_key_file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"cannot read --api-key-file {settings.api_key_file}: {e}") from e
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise UserError(f"--api-key-file {settings.api_key_file} has no key; write one a line")
        keys = (*keys, *in_file)
    if any(not key.strip() for key in keys):
        raise UserError("--api-key is empty; give a key, or leave the flag out")
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return Settings(**{**values, "api_key": keys})

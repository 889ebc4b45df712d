"""The settings of the server. Each is a flag, an environment variable `RUNG_…` and a key of the `--config` file."""

import argparse
import importlib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints.hub import fetched, is_hub_name
from checkpoints.presets import has_random_weights
from cli import Parser
from engine.calls.syntax import SYNTAXES
from engine.protocol import ADAPTER_NAME, SamplingParams
from engine.thinking import REASONING
from errors import UserError
from files import model_folder, model_name, shown
from kernels import determinism
from options import (
    TUNE_SECONDS,
    ModelOptions,
    SharedTextOptions,
    SpeculationOptions,
    StandInOptions,
    add_options,
    count,
    option,
    positive,
    zero_or_more,
)
from server.journal_file import JournalBounds
from server.limits import read_keys
from server.logs import METRIC_PATHS

VERSION = "0.1.0"
ENV_PREFIX = "RUNG_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
GENERATION = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
GENERATION |= {"max_new_tokens": "max_tokens"}  # keys of generation_config.json, with their names in `SamplingParams`
MEMORY_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def network(text: str) -> str:
    """Parse an address or a network. Returns it as the module ipaddress writes it."""
    try:
        found = ipaddress.ip_network(text.strip())
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text} is not an address or a network such as 10.0.0.0/8 ({e})") from e
    return str(found.network_address) if found.num_addresses == 1 else str(found)


def memory_size(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match or not (value := float(match[1]) * MEMORY_UNITS[match[2]]):
        raise argparse.ArgumentTypeError(f"{text} is neither bytes such as 2G nor a share such as 0.9")
    return value


def generation_defaults(text: str) -> Mapping[str, Any]:
    """The fields of `SamplingParams` for keys of a generation_config.json."""
    try:
        given = json.loads(text)
        unknown = ", ".join(sorted(given.keys() - GENERATION.keys()))
    except (ValueError, RecursionError, AttributeError):
        raise argparse.ArgumentTypeError('it is no JSON object such as {"temperature": 0.6}') from None
    if unknown:
        raise argparse.ArgumentTypeError(f"it has {shown(unknown)}, but only these are read: {', '.join(GENERATION)}")
    found = {GENERATION[name]: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**found)
    except UserError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    return found


@dataclass(frozen=True, kw_only=True)
class NameOptions:
    served_model_name: tuple[str, ...] = option(
        (),
        "what clients call the model; may be repeated, the first one appears in answers (default: the directory's name)",
        metavar="NAME",
    )
    chat_template: str | None = option(
        None, "a Jinja file, or the name of one of the checkpoint's templates (default: its own)", metavar="FILE|NAME"
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "what requests have that do not say it, with the keys of a generation_config.json: temperature, top_p, top_k, min_p, "
        "repetition_penalty, max_new_tokens (default: what /docs says; the checkpoint's file sets none of them)",
        type=generation_defaults,
        metavar="JSON",
    )
    parse_control_tokens: bool = option(
        False,
        "read control tokens such as <|end|> in messages as those tokens, as transformers does. A message can then forge "
        "other turns (default: they are text, and only the chat template writes control tokens)",
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning, which answers have as reasoning_content. think (also called qwen3): "
        "<think>…</think>; deepseek_r1: the same, and an answer that does not begin with <think> is reasoning up to "
        "</think>, or to its end; thinking, reasoning: tags of these names; seed_oss: <seed:think>; mistral: [THINK]…[/THINK]; gemma4: "
        "<|channel>thought…<channel|>; harmony: gpt-oss's channel analysis; none: reasoning is text. auto: the one that the chat "
        "template has",
        choices=("auto", *REASONING, "none"),
    )
    tool_parser: str = option(
        "auto",
        "how the model writes tool calls. hermes (also Qwen): <tool_call>; llama3_json: JSON with parameters, also after "
        "<|python_tag|>; mistral: [TOOL_CALLS]name[ARGS]; mistral_list: [TOOL_CALLS] and a JSON list; json: JSON, also in a "
        "code block; qwen3_coder, seed_oss, glm45, glm47, kimi_k2, deepseek_v3, deepseek_v31, gemma4, granite, phi4_mini, olmo3, lfm2: as these "
        "models do; harmony: as gpt-oss does; pythonic, llama4_pythonic: [name(key=value)]; none: calls that tool_choice does not "
        "force are text. "
        "auto: as the chat template writes them",
        choices=("auto", *SYNTAXES, "none"),
    )
    trust_request_chat_template: bool = option(
        False,
        "render the chat_template of a request. A template is a program. It runs in a sandbox, in a process with limits, but "
        "such programs can still keep those processes busy (default: refused with a 400)",
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    max_num_seqs: int = count(
        64, "most sequences in a step; more give more tokens/s in all and a slower stream for each", high=1 << 16
    )
    max_batch_tokens: int | None = count(
        None,
        "most tokens in a step; longer prompts are computed in parts, so a smaller number keeps streams smooth (default: the "
        "fewest with 98 %% of the throughput on such a GPU with layers of about this size, else 2048)",
        high=1 << 20,
    )
    block_size: int = count(16, "tokens in a block of the KV cache; whole blocks are reused for common prefixes")
    tune_seconds: int = count(
        TUNE_SECONDS,
        "at a model's first start on a GPU, measure for at most about S seconds which kernels make its linear layers "
        "fastest. The result is kept in $RUNG_CACHE or ~/.cache/rung; 0 measures nothing",
        low=0,
        metavar="S",
    )
    kv_memory: float | None = option(  # up to 1: a share of the free memory; above 1: bytes
        None,
        "memory of the KV cache on each rank: bytes such as 2G or 512M, or a share of the free memory such as 0.9. A request "
        "has at most the tokens that fit into it (default: on a GPU 0.9, but 2 GiB stay free for graphs, and 2 more for a "
        "draft model's; 1 GiB on a CPU)",
        type=memory_size,
        metavar="SIZE",
    )


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    lora: tuple[str, ...] = option(
        (),
        "serve the LoRA adapter in folder DIR, as PEFT saves it, as model NAME beside the base; may be repeated",
        metavar="NAME=DIR",
    )
    max_loras: int | None = count(
        None,
        "most adapters at once; memory for so many is taken at the start (default: those of --lora; with "
        "--allow-lora-updates at least 4)",
        high=256,
    )
    max_lora_rank: int | None = count(
        None,
        "largest rank of an adapter; each takes the memory of this rank, rounded up to a power of two from 16 on (default: "
        "the largest of --lora; with --allow-lora-updates at least 64)",
        high=1024,
        metavar="R",
    )
    allow_lora_updates: bool = option(
        False,
        "let clients load and unload adapters, with /v1/load_lora_adapter and /v1/unload_lora_adapter; needs --lora-root "
        "(default: those of --lora, while the server runs)",
    )
    lora_root: str | None = option(
        None, "the folder in which all adapters lie that clients may load; links out of it are refused", metavar="DIR"
    )

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """The names and folders of --lora. Raises UserError."""
        pairs = [text.partition("=") for text in self.lora]
        if wrong := next((name + sign for name, sign, path in pairs if not (name and sign and path)), None):
            raise UserError(f"--lora {wrong} is not NAME=DIR; give a name and the adapter's folder")
        if wrong := next((name for name, _, _ in pairs if not re.fullmatch(ADAPTER_NAME, name)), None):
            raise UserError(
                f"--lora {shown(wrong)}: a name has up to 200 of A-Z a-z 0-9 . _ ~ : @ + - and begins with a letter or digit"
            )
        return [(name, path) for name, _, path in pairs]

    @property
    def lora_slots(self) -> int:
        """Most adapters at once. Raises UserError."""
        return self.max_loras or max(4 if self.allow_lora_updates else 0, len(self.adapters))


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines connect: then set --api-key, too")
    port: int = count(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    uds: str | None = option(None, "listen on this Unix socket instead of --host and --port", metavar="FILE")
    ssl_certfile: str | None = option(
        None, "serve HTTPS, with the certificates in this PEM file (default: HTTP)", metavar="FILE"
    )
    ssl_keyfile: str | None = option(None, "its private key, without a password (default: in --ssl-certfile)", metavar="FILE")
    root_path: str | None = option(
        None, "the path, such as /llm, that a proxy removes in front of this server: for /openapi.json", metavar="PATH"
    )
    api_key: tuple[str, ...] = option(
        (),
        "clients must send it as a bearer token; may be repeated. 'KEY name=NAME weight=N' names its client in the log and "
        "gives it a share of N against others' 1. All users of this machine see it in the list of processes: prefer "
        "RUNG_API_KEY or --api-key-file",
        repr=False,
        metavar="KEY",
    )
    api_key_file: str | None = option(None, "file with one key a line; lines that start with # are comments", metavar="FILE")
    protect_metrics: bool = option(
        False, f"require the key for {', '.join(METRIC_PATHS)}, too (default: these are open to all)"
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "let web pages from this origin call the API, such as https://chat.example.org, or * for all; may be repeated "
        "(default: none)",
        metavar="ORIGIN",
    )
    trusted_proxy: tuple[str, ...] = option(
        (),
        "for connections from this address or network, such as 127.0.0.1 (also --uds) or 10.0.0.0/8, the client is the one that "
        "X-Forwarded-For names, in the access log and for --fairness; may be repeated (default: none: the connection's own "
        "address)",
        type=network,
        metavar="ADDRESS",
    )
    embedding_pooling: str | None = option(
        None,
        "what /v1/embeddings and /v1/score take where a request does not say it: the mean of all tokens' hidden states, or "
        "the last token's (default: as the checkpoint's files of sentence-transformers say, else mean)",
        choices=("mean", "last"),
    )
    strict_requests: bool = option(
        False,
        "refuse requests with unknown parameters (default: ignore them, and name them in the header X-Rung-Ignored and in "
        "the log)",
    )


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    max_queue: int = count(
        1024, "most waiting sequences, in addition to --max-num-seqs; further clients get a 429 with Retry-After", low=0
    )
    max_queue_per_client: int | None = count(
        None,
        "the same for the sequences of one client (default: seven eighths of --max-queue, with --fairness off all of it)",
        low=0,
    )
    fairness: str = option(
        "clients",
        "clients: each client gets an equal share of the batch and the queue, whatever others send, or a share by its key's "
        "weight. A client is an API key, or without keys an address. off: in the order of arrival",
        choices=("clients", "off"),
    )
    allow_priority: bool = option(
        False,
        "let requests have a priority, which takes them past other clients' requests (default: one other than 0 is a 400)",
    )
    request_timeout: float = positive(600.0, "longest time of a request, in seconds", "S")
    idle_timeout: float = positive(
        30.0, "close a connection that sends no request, or reads no answer, for this many seconds", "S"
    )
    drain_timeout: float = positive(30.0, "after SIGTERM, running requests have this many seconds to end", "S")
    max_body_mb: float = positive(16.0, "largest body of a request, in MiB; a larger one gets a 413", "MIB")
    workers: int = count(
        2,
        "worker processes for chat templates, long texts, schemas and large bodies; with two or more, one of them takes only "
        "short jobs",
    )
    worker_seconds: float = positive(
        10.0, "longest time of a job in a worker process, in seconds; then the process is killed", "S"
    )


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    max_restarts: int = count(
        8,
        "start ranks that died or hang again, and a frontend that died, at most N times in 10 minutes; accepted requests go "
        "on. With 0 the server ends",
        low=0,
    )
    hang_seconds: float | None = option(
        None,
        "ranks that report nothing for S seconds hang and are killed, and so is a frontend that does not run; 0: never "
        "(default: for ranks 10 times as long as the largest step can take, from the measured steps, and at least 30; for "
        "the frontend 30)",
        type=zero_or_more,
        metavar="S",
    )
    journal: str | None = option(
        None,
        "write accepted requests to FILE before their clients get anything, so that they outlive the server: the next start "
        "with the same FILE finishes them. GET /v1/results/ID then has the answer; ID is the answer's id or the request's "
        "X-Request-Id. FILE has prompts and answers. It is made if it does not exist, and belongs to one server at a time "
        "(default: none)",
        metavar="FILE",
    )
    journal_hours: float = positive(24.0, "results stay in --journal for H hours after the request came", "H")
    journal_results: int = count(10_000, "most requests and results in --journal; old results go")
    journal_mb: float = positive(1024.0, "largest size of --journal in MiB; old results go", "MIB")
    files_hours: float = positive(168.0, "files and ended batches go after H hours; a batch may take as many", "H")
    files_kept: int = count(1000, "most files and batches beside --journal; one client has at most half", low=2)
    files_mb: float = positive(4096.0, "most MiB of these files; one client has at most half", "MIB")
    batch_lines: int = count(50_000, "most requests of a batch")
    batch_in_flight: int | None = count(
        None, "most lines of batches that are computed at a time, behind all other requests (default: half of --max-num-seqs)"
    )


@dataclass(frozen=True, kw_only=True)
class ResponsesOptions:
    responses_hours: float = positive(
        24.0, "answers of /v1/responses stay in memory for H hours, for GET and previous_response_id", "H"
    )
    responses_kept: int = count(1000, "most of these answers; old ones go")
    responses_mb: float = positive(64.0, "most memory of these answers and their conversations in MiB; old ones go", "MIB")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    log_format: str = option("text", "format of the access log, one line a request", choices=("text", "json"))
    log_level: str = option(
        "info",
        "least severe messages that are logged; warning omits the access log",
        choices=("debug", "info", "warning", "error"),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send OpenTelemetry spans of requests to the collector at URL over HTTP, such as http://localhost:4318/v1/traces; "
        "needs pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http (default: none)",
        metavar="URL",
    )


GROUPS = {
    "the model": ModelOptions,
    "its name and chat template": NameOptions,
    "batches and KV cache": BatchOptions,
    "speculation": SpeculationOptions,
    "speculation from other requests": SharedTextOptions,
    "benchmarks": StandInOptions,
    "LoRA adapters": LoraOptions,
    "HTTP": HttpOptions,
    "limits": LimitOptions,
    "faults": FaultOptions,
    "stored responses": ResponsesOptions,
    "logs and traces": LogOptions,
}


NEEDS = {  # flags that need one of others: the fields of both, and what a user adds
    ("draft_tokens", "ngram_prompts"): {"speculate": "--speculate ngram"},
    ("max_loras", "max_lora_rank"): {"lora": "--lora NAME=DIR", "allow_lora_updates": "--allow-lora-updates"},
    ("lora_root",): {"allow_lora_updates": "--allow-lora-updates"},
    ("ssl_keyfile",): {"ssl_certfile": "--ssl-certfile FILE"},
    ("protect_metrics",): {"api_key": "--api-key", "api_key_file": "--api-key-file FILE"},
    ("journal_hours", "journal_results", "journal_mb"): {"journal": "--journal FILE"},
    ("files_hours", "files_kept", "files_mb", "batch_lines", "batch_in_flight"): {"journal": "--journal FILE"},
}


@dataclass(frozen=True, kw_only=True)
class Settings(
    ModelOptions,
    NameOptions,
    BatchOptions,
    SpeculationOptions,
    SharedTextOptions,
    StandInOptions,
    LoraOptions,
    HttpOptions,
    LimitOptions,
    FaultOptions,
    ResponsesOptions,
    LogOptions,
):
    """All settings, already checked. Made by `load_settings`; tests may construct it directly."""

    @property
    def random_weights(self) -> bool:
        """Whether `model` is a preset, or a config.json without weights."""
        return has_random_weights(self.model)

    @property
    def needs_hub(self) -> bool:
        """Whether a model, a draft or an adapter is named by its name on the hub."""
        return any(map(is_hub_name, (self.model, self.speculate or "", *(path for _, path in self.adapters))))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; the first one appears in answers."""
        return self.served_model_name or (_served_name(self.model),)

    @property
    def client_queue(self) -> int:
        """Most waiting sequences of one client."""
        if self.max_queue_per_client is not None:
            return min(self.max_queue_per_client, self.max_queue)
        return self.max_queue - (self.max_queue // 8 if self.fairness == "clients" else 0)

    @property
    def journal_bounds(self) -> JournalBounds:
        return JournalBounds(int(self.journal_mb * 2**20), self.journal_results, self.journal_hours * 3600)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)


def load_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Raises UserError for an invalid one.

    The order of precedence is: command line, environment, file, default. A list replaces the lists from sources of lower
    precedence; lists are not merged.
    """
    parser = build_parser()
    given = vars(parser.parse_args(argv))
    from_env = parse_environment(parser, os.environ if environ is None else environ)
    config = given.pop("config", None) or from_env.get("config")
    from_env.pop("config", None)
    from_file = parse_file(parser, config) if config else {}
    merged = {**from_file, **from_env, **given}
    merged = {name: tuple(value) if isinstance(value, list) else value for name, value in merged.items()}
    if not merged.get("model"):
        raise UserError("no model; pass --model DIR (or set RUNG_MODEL), for example --model models/tiny-hybrid")
    settings = Settings(**merged)
    check_needs(settings)
    check_adapters(settings)
    adapters = settings.lora or settings.allow_lora_updates
    determinism.refuse(settings.deterministic, compiled=settings.compile, adapters=adapters)
    return _with_key_file(settings)


def with_files(settings: Settings) -> Settings:
    """The settings with the folders of what they name on the hub, once its files are there. Raises UserError."""
    adapters = tuple(f"{name}={fetched(path, 'adapter')}" for name, path in settings.adapters)
    draft = settings.speculate and fetched(settings.speculate, "draft")
    return replace(settings, model=fetched(settings.model), speculate=draft, lora=adapters)


def _served_name(model: str) -> str:
    """A model on the hub has its name there, a folder the last part of its path."""
    if is_hub_name(model):
        return model.partition("@")[0]
    name = model_name(model)
    return name if name != model else model_folder(model).absolute().name or model


def check_needs(settings: Settings) -> None:
    """Raises UserError for a flag that has no effect without others. Its default may be given: programs pass on all their
    flags."""
    for names, needed in NEEDS.items():
        for name in names:
            given = getattr(settings, name) != getattr(Settings, name)
            if given and not any(getattr(settings, one) for one in needed):
                words = " or ".join(needed.values())
                raise UserError(f"--{name.replace('_', '-')} has no effect here; add {words}, or leave it out")
    if settings.uds and (settings.host, settings.port) != (Settings.host, Settings.port):
        raise UserError("--uds is listened on instead of --host and --port; leave it or them out")


def check_adapters(settings: Settings) -> None:
    """Raises UserError if the flags of adapters contradict each other or others."""
    names = [*settings.model_names, *(name for name, _ in settings.adapters)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two models are called {twice}; choose another name in --lora")
    if settings.max_loras is not None and len(settings.adapters) > settings.max_loras:
        raise UserError(f"--lora names {len(settings.adapters)} adapters, but --max-loras is {settings.max_loras}; raise it")
    if settings.allow_lora_updates and not (settings.lora_root and Path(settings.lora_root).is_dir()):
        raise UserError(
            "--allow-lora-updates needs --lora-root DIR, the folder in which all adapters lie that clients may load"
        )


def build_parser() -> argparse.ArgumentParser:
    """A parser whose result has only the settings that were given."""
    parser = Parser(
        prog="python -m server",
        names_model=True,
        description="Serve a checkpoint over an OpenAI-compatible HTTP API.",
        epilog="Each flag may also be an environment variable (--max-num-seqs: RUNG_MAX_NUM_SEQS; lists are separated by commas) "
        "or a key of the --config file (max-num-seqs). The command line takes precedence over the environment, the environment "
        "over the file.",
        formatter_class=argparse.HelpFormatter,  # wraps the epilog
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, JSON or YAML; keys are the flags without --")
    parser.add_argument("--version", action="version", version=f"rung {VERSION}")
    for title, kind in GROUPS.items():
        add_options(parser, kind, title)
    return parser


def _with_key_file(settings: Settings) -> Settings:
    keys = settings.api_key
    if settings.api_key_file:
        try:
            lines = [line.strip() for line in Path(settings.api_key_file).read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"cannot read --api-key-file {settings.api_key_file}: {e}") from e
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise UserError(f"--api-key-file {settings.api_key_file} has no key; write one a line")
        keys = (*keys, *in_file)
    read_keys(keys)
    return replace(settings, api_key=keys)


# --- the environment and the file, read as if they were arguments of the command line ----------------------------------


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.dest not in ("help", "version", "model_word")}


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

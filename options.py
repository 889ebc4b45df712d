"""Options that several programs share, as dataclasses whose fields are also command-line flags."""

import argparse
import math
import operator
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from comms.registry import KNOWN
from config import FAMILIES, TEXTS, usage
from quantized.scheme import QUANTIZATIONS

DTYPE_NAMES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8")
OVERLAPS = ("auto", "overlapped", "few-sms", "deferred", "copy-engines")  # `auto`, and `comms.interface.SCHEDULES`
TUNE_SECONDS = 30  # at a model's first start on a GPU, at most, to find its fastest kernels
MOST_DRAFT_TOKENS = 64
LARGEST = 1e9  # of the numbers that flags take; a thread can wait for at most 9.2e9 seconds


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type of flags: whole numbers from `low`, to `high` if there is one."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text} is not {f'at least {low}' if high is None else f'from {low} to {high}'}")
        return value

    parse.__name__ = "int"  # argparse says "invalid int value"
    return parse


def above_zero(text: str) -> float:
    """A type of flags: numbers above 0."""
    return _number(text, operator.gt, "above 0")


def zero_or_more(text: str) -> float:
    """A type of flags: 0, and numbers above it."""
    return _number(text, operator.ge, "of at least 0")


def _number(text: str, fits: Callable[[float, float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # which does not fit
    if not (fits(value, 0) and value < LARGEST):
        raise argparse.ArgumentTypeError(f"{text!r} is no number {words} and below {LARGEST:g}")
    return value


def option(default: Any, help: str, *, repr: bool = True, **flag: Any) -> Any:
    """A field that is also a flag. `default`: MISSING for a required one. `flag`: further arguments of `add_argument`.

    A default that is a number or a text is added to the help, unless the help itself says what the default is.
    """
    if type(default) in (int, float, str) and "(default: " not in help:
        help += f" (default: {str(default).removesuffix('.0')})"
    return field(default=default, repr=repr, metadata={"help": help, **flag})


def count(default: int | None, help: str, *, low: int = 1, high: int | None = None, metavar: str = "N") -> Any:
    """A field that is also a flag, whose value is a whole number from `low`, to `high` if there is one."""
    return option(default, help, type=whole_number(low, high), metavar=metavar)


def positive(default: float, help: str, metavar: str) -> Any:
    """A field that is also a flag, whose value is a number above 0."""
    return option(default, help, type=above_zero, metavar=metavar)


def add_options(
    parser: argparse.ArgumentParser, kind: type, title: str, *, without: Collection[str] = (), optional: Collection[str] = ()
) -> None:
    """Add the options that class `kind` itself declares as a group of flags.

    A bool becomes --name and --no-name. A tuple becomes a flag that may be repeated. A field without a default is a required
    flag, except those of `optional`, which are then None. If the parser suppresses defaults, so does each flag, and none is
    required.
    """
    group = parser.add_argument_group(title)
    suppressed = parser.argument_default == argparse.SUPPRESS
    for one in fields(kind):
        if one.name in without or one.name not in kind.__annotations__ or not one.metadata:
            continue
        flag = dict(one.metadata)
        if isinstance(one.default, bool):
            flag["action"] = argparse.BooleanOptionalAction
        elif isinstance(one.default, tuple):
            flag["action"] = "append"
        if one.default is MISSING:
            flag["required"] = not suppressed and one.name not in optional
        elif not suppressed:
            flag["default"] = one.default
        group.add_argument("--" + one.name.replace("_", "-"), **flag)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its device, and how its ranks communicate."""

    model: str = option(
        MISSING,
        "a model's name on the hub, ORG/NAME or ORG/NAME@REVISION, fetched into the cache of huggingface_hub, or a checkpoint "
        f"directory: HF safetensors, or gpt-fast's model.pth with its config.json (families: {', '.join([*FAMILIES, *TEXTS])}). "
        "For benchmarks also a preset "
        "such as llama-3-70b or llama-3-70b:16 (16 of its layers), or a config.json alone: the weights are then random",
        metavar="ORG/NAME|DIR|PRESET",
    )
    tp: int | None = count(
        None,
        "start N tensor-parallel ranks on this host, each on a GPU of its own if there are GPUs (default: 1; under torchrun, "
        "the number of its ranks)",
    )
    variant: str | None = option(
        None, f"compute another residual variant than the checkpoint's: {usage()}. For benchmarks: the text will be wrong"
    )
    dtype: str | None = option(
        None,
        "data type of weights and activations (default: bfloat16 on CUDA; on CPUs that multiply it, for checkpoints in bfloat16 of "
        "67 million parameters and more, unless --deterministic; else float32)",
        choices=DTYPE_NAMES,
    )
    quantize: str | None = option(
        None,
        "quantize the linear layers of a 16- or 32-bit checkpoint or a preset while loading it, by rounding to nearest: fp8 "
        "(weights by row, activations by token), int8 (weights by row), int4 (weights in groups of 128). With +head the "
        "output layer becomes int8, too. It saves memory, and time in decoding on Hopper GPUs; int8 and int4 in bfloat16 also on CPUs",
        choices=QUANTIZATIONS,
    )
    kv_dtype: str = option(
        "auto",
        "data type of the KV cache: auto, which is the model's, or fp8, which holds almost twice as many tokens of a 16-bit "
        "model and rounds keys and values to 4 bits of precision, with a scale for each token and head",
        choices=KV_DTYPES,
    )
    max_model_len: int | None = count(
        None, "most tokens of prompt and answer together (default: what the model allows). RoPE scaling by length depends on it"
    )
    device: str | None = option(None, "default: cuda if there is a GPU", choices=("cpu", "cuda"))
    comm: str | None = option(
        None, f"algorithm of the all-reduces: {KNOWN} (default: auto on CUDA, gloo on CPU)", metavar="NAME"
    )
    comm_error_budget: float = option(
        0.0,
        "largest relative error of an all-reduce that --comm auto may accept to be faster, by quantizing it; 0.01 allows "
        "int8 (default: 0, exact)",
        type=float,
        metavar="E",
    )
    overlap: str = option(
        "auto",
        "how a ladder's all-reduces are computed: overlapped with the next module, the same on few SMs or, if they are long, "
        "by copy-engines, or deferred, which is not overlapped but fused with what follows (default: auto, on GPUs the "
        "fastest for each size of a step, measured when its graph is captured and kept in $RUNG_CACHE or ~/.cache/rung; on a "
        "CPU overlapped)",
        choices=OVERLAPS,
    )
    simulate_link: str | None = option(
        None,
        "on CPU, make all-reduces take as long as over such a link: 10us,100GB/s (default: no delay)",
        metavar="LATENCY,BANDWIDTH",
    )
    deterministic: bool = option(
        False,
        "the same bits of log-probabilities and tokens for every batch, chunking, prefix hit, preemption, speculation and "
        "number of ranks (1, 2, 4 or 8); slower (default: off)",
    )
    compile: bool = option(
        False, "compile the modules with torch.compile; all-reduces are then not fused with GEMMs (default: off)"
    )


def unless_off(text: str) -> str | None:
    """The text of a flag, None for `off`, which takes back an earlier value."""
    return None if text == "off" else text


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How several tokens of a sequence are computed in one step."""

    speculate: str | None = option(
        None,
        "guess the next tokens of an answer and verify them in one step, which changes no token but where two are nearly "
        "tied: ngram continues what occurred before in the prompt, the answer, or the text that a request predicts; the "
        "folder or name on the hub of a smaller checkpoint with the same vocabulary, or of an EAGLE-3 head for the model, lets this guess, too; "
        "auto is the head in the model's folder draft if there is one, else ngram; for benchmarks random-head is a head with "
        "random weights for a model with random weights (default: off)",
        type=unless_off,
        metavar="ngram|auto|DIR|off",
    )
    draft_tokens: int = count(
        7,
        f"with --speculate, the most tokens to guess at once, up to {MOST_DRAFT_TOKENS}; it guesses fewer where they are "
        "often wrong",
        high=MOST_DRAFT_TOKENS,
        metavar="K",
    )


@dataclass(frozen=True, kw_only=True)
class SharedTextOptions:
    """What requests share to guess tokens."""

    ngram_prompts: int = count(
        0,
        "with --speculate, also guess what followed the last tokens in other requests' prompts, of which the newest N tokens "
        "are kept, in 0.3 KB each on every rank. Who sends many requests can learn others' prompts token by token, from the "
        "counts of right guesses and from return_drafted",
        low=0,
        high=1 << 22,
    )


@dataclass(frozen=True, kw_only=True)
class StandInOptions:
    """A simulated acceptance rate of drafts, for benchmarks of models with random weights."""

    accept_rate: float | None = option(
        None,
        "for benchmarks with random weights, whose drafts are never right: each drafted token counts as right with "
        "probability P, whatever the model draws, and only a head or a model drafts. The answers are then noise of another "
        "kind (default: off)",
        type=float,
        metavar="P",
    )


def rank_options(options: Any) -> dict[str, Any]:
    """The arguments of `tp.init_world` among a program's options: a `ModelOptions`, or what argparse made of its flags."""
    names = ("device", "comm", "simulate_link", "comm_error_budget", "overlap", "deterministic")
    return {name: getattr(options, name) for name in names}


def draft_limit(speculate: str | None, draft_tokens: int) -> int:
    """The most tokens of a draft, 0 without --speculate."""
    return draft_tokens if speculate else 0


def dtype_name(dtype: str | None, device: str) -> str:
    """The name of --dtype, or of the default for `device`: cpu or cuda."""
    return dtype or ("bfloat16" if device == "cuda" else "float32")

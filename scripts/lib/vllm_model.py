"""What vLLM needs to run a preset with random weights, in the same number of bits as Rung."""

import argparse
import json
from pathlib import Path

from checkpoints.hf_config import config_to_hf
from checkpoints.presets import model_config
from quantized.hf import scheme_to_hf
from quantized.scheme import SCHEMES

MEMORY = 0.85  # the share of a GPU's memory that vLLM may use in a sweep
QUANTIZES = ("fp8", "int4")  # values of --quantize in which vLLM can hold random weights


def memory_share(text: str) -> float:
    """The type of `--vllm-memory`."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of a GPU's memory; give a number above 0, at most 1")
    return share


def add_vllm_memory(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--vllm-memory",
        type=memory_share,
        metavar="SHARE",
        help=f"share of a GPU's memory that vLLM may use (default: {MEMORY} in a sweep, vLLM's own of a server)",
    )


def write_model(folder: Path, model: str, ranks: int, quantize: str | None) -> str | None:
    """Write the model's config.json into `folder`. Returns vLLM's argument `quantization`: it rounds weights to fp8 itself, and
    finds other formats in the config."""
    config = config_to_hf(model_config(model, None, ranks))
    if quantize not in (None, "fp8"):
        config["quantization_config"] = scheme_to_hf(SCHEMES[quantize])
    (folder / "config.json").write_text(json.dumps(config))
    return quantize if quantize == "fp8" else None

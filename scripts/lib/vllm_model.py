"""What vLLM needs to run a preset with random weights, in the same number of bits as Rung."""

import json
from pathlib import Path

from hf_config import config_to_hf
from presets import model_config
from quantized.compressed import scheme_to_hf
from quantized.scheme import SCHEMES

QUANTIZES = ("fp8", "int4")  # values of --quantize in which vLLM can hold random weights


def write_model(folder: Path, model: str, ranks: int, quantize: str | None) -> str | None:
    """Write the model's config.json into `folder`. Returns vLLM's argument `quantization`: it rounds weights to fp8 itself, and
    finds other formats in the config."""
    config = config_to_hf(model_config(model, None, ranks))
    if quantize not in (None, "fp8"):
        config["quantization_config"] = scheme_to_hf(SCHEMES[quantize])
    (folder / "config.json").write_text(json.dumps(config))
    return quantize if quantize == "fp8" else None

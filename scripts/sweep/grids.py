"""The configurations of a sweep: named sets of axes, and the product of all axes."""

import argparse
import subprocess
from dataclasses import replace
from itertools import chain, filterfalse, product
from typing import Any

import torch

from checkpoints.hub import fetched
from checkpoints.presets import has_random_weights, model_config
from checkpoints.sources import open_source
from comms.registry import choose
from errors import UserError
from scripts.lib.vllm_model import QUANTIZES
from scripts.sweep.rows import VLLM, Setting, interconnect

DEFAULTS: dict[str, Any] = {
    "models": ["llama-3-8b"],
    "variants": ["standard", "ladder", "upper-bound"],
    "tp": [max(1, torch.cuda.device_count())],
    "batch_sizes": [1, 4, 16, 64],
    "comms": [None],
    "interconnects": ["default"],
    "prompt_lengths": [1024],
    "new_tokens": [512],
}
# replaces DEFAULTS on a CPU; takes about a minute
ON_CPU = {"models": ["tiny"], "tp": [2], "batch_sizes": [1, 4], "prompt_lengths": [64], "new_tokens": [32]}

PAPER = {"tp": [8], "prompt_lengths": [1024], "new_tokens": [512], "interconnects": ["default", "no-p2p"]}
GRIDS: dict[str, dict[str, Any]] = {
    "latency": {"variants": ["standard", "parallel", "ladder", "desync-2x", "desync-4x", "upper-bound"], "batch_sizes": [1]},
    # how much a ladder would gain at batch 1: between the standard model and one without all-reduces
    "ladder": {"variants": ["standard", "ladder", "upper-bound"], "batch_sizes": [1]},
    "table-1": {
        **PAPER,
        "models": ["ladder-1b", "ladder-3b", "llama-3-8b", "llama-34b", "llama-3-70b", "bloom-176b"],
        "variants": ["standard", "ladder"],
        "batch_sizes": [4],
    },
    "table-2": {
        **PAPER,
        "models": ["llama-3-70b"],
        "variants": ["standard", "parallel", "ladder", "upper-bound"],
        "batch_sizes": [1],
    },
    "table-6": {
        **PAPER,
        "models": ["llama-3-8b"],
        "variants": ["standard", "ladder", "desync-2x", "desync-4x", "upper-bound"],
        "batch_sizes": [64],
    },
    "figure-2": {**PAPER, "models": ["llama-3-70b"], "variants": ["standard", "parallel", "ladder"], "tp": [1, 2, 4, 8]},
}


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """The product of all axes. Variants vary fastest, so that the variants of one configuration are measured close in time.

    Raises UserError for an axis with a bad value.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    grid = DEFAULTS | (ON_CPU if device == "cpu" else {}) | GRIDS.get(args.grid, {})
    axes = {name: getattr(args, name) or grid[name] for name in DEFAULTS}
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    shapes = [*product(axes["prompt_lengths"], axes["new_tokens"], axes["batch_sizes"])]
    if args.also:
        batch, *lengths = args.also
        shapes.append((*lengths, batch))
    if min(*axes["tp"], *chain(*shapes), args.runs) < 1:
        raise UserError("--tp, --batch-sizes, --prompt-lengths, --new-tokens, --also and --runs must be at least 1")
    for comm, link in product(axes["comms"], axes["interconnects"]):
        choose(device, comm, interconnect(link).link)
    for model, variant, tp in product(map(fetched, axes["models"]), axes["variants"], axes["tp"]):
        model_config(model, None if variant == VLLM else variant, tp, args.quantize)
    for model in filterfalse(has_random_weights, map(fetched, axes["models"])):
        open_source(model, model_config(model, None, 1))
    if any(interconnect(link).hosts > 1 for link in axes["interconnects"]) and any(tp % 2 for tp in axes["tp"]):
        raise UserError("--interconnects two-hosts needs an even number of ranks; leave the odd ones out of --tp")
    refuse_vllm_where_it_cannot_run(axes, device, args.vllm_python)
    if VLLM in axes["variants"] and args.quantize not in (None, *QUANTIZES):
        raise UserError(
            f"vLLM is not measured with {args.quantize}, only with {' and '.join(QUANTIZES)}; leave vllm out of --variants"
        )
    order = (*(axes[name] for name in ("tp", "interconnects", "models", "comms")), shapes, axes["variants"])
    settings = [
        Setting(
            model, variant, tp, batch, prompt, new, comm, link, device, dtype,
            args.compile, seed, args.runs, args.profile, args.overlap, args.kv_dtype, args.quantize, args.deterministic,
        )
        for seed, (tp, link, model, comm, (prompt, new, batch), variant) in product(
            dict.fromkeys(args.seeds), product(*map(dict.fromkeys, order))
        )
    ]  # fmt: skip
    # vLLM has its own all-reduce, so --comms does not apply to it
    return list(
        dict.fromkeys(
            replace(s, comm=None, profile=False, overlap="auto", deterministic=False) if s.variant == VLLM else s
            for s in settings
        )
    )


# does not import vLLM, which would take as long as a small measurement
FIND_VLLM = """import importlib.util, sys; importlib.util.find_spec("vllm") or sys.exit("No module named 'vllm'")"""


def refuse_vllm_where_it_cannot_run(axes: dict[str, Any], device: str, python: str) -> None:
    """Raise UserError if vLLM is to be measured and these axes or this environment do not allow it."""
    if VLLM not in axes["variants"]:
        return
    if device != "cuda" or any(interconnect(link).hosts > 1 for link in axes["interconnects"]):
        raise UserError("--variants vllm needs GPUs of one host; leave it out")
    if not all(has_random_weights(model) for model in axes["models"]):
        raise UserError(
            "--variants vllm measures presets and a config.json alone, with random weights; leave it or the checkpoints out"
        )
    try:
        found = subprocess.run([python, "-c", FIND_VLLM], capture_output=True, text=True, check=False)
        said = found.stderr.strip().splitlines() if found.returncode else []
    except OSError as e:
        said = [e.strerror or str(e)]
    if said:
        raise UserError(
            f"{python} cannot import vllm ({said[-1]}); name the Python of an environment that holds it: --vllm-python"
        )

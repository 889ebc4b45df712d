"""Convert a standard checkpoint to a hybrid ladder: different residual connections, the same weights.

    python -m training.convert --model DIR --ladder-layers 16 --out NEW_DIR

--ladder-layers names the layers that switch to the ladder residual: a number K for the last K layers, or a list such as 12-31
or 12,14,16-31. The paper takes the upper half (arXiv:2501.06589, section 4.2). No weight changes: config.json is rewritten, and
the weight files are copied, or shared with --link. NEW_DIR loads like any checkpoint, also with transformers
(trust_remote_code=True: the model's code is in NEW_DIR). Its text is poor until it is retrained, because its layers get other
inputs than in their training. python -m training.adapt converts and retrains.
"""

import argparse
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoints.export import MODELING, TOKENIZER_FILES, add_modeling, copy_tokenizer, save_config
from checkpoints.hf_config import config_to_hf, read_config
from checkpoints.hub import fetch_checkpoint
from checkpoints.sources import open_files
from checkpoints.weights import check_source
from cli import Parser, run
from comms import Local
from config import ModelConfig, require_causal, validate
from errors import UserError
from files import WEIGHTS
from tp import World


def to_hybrid_ladder(config: ModelConfig, ladder_layers: int | Sequence[int]) -> ModelConfig:
    """`config` with the ladder residual in its last `ladder_layers` layers, or in the layers that `ladder_layers` lists.

    Raises UserError if `config` is not standard, is quantized, is not causal, or does not have these layers.
    """
    require_causal(config)
    if config.quantization is not None:
        raise UserError(f"the checkpoint is quantized ({config.quantization.description}); convert the one in 16 bits")
    if config.variant != "standard":
        raise UserError(
            f"only a standard model can be converted, and this one is {config.description}; start from the standard checkpoint "
            "that it was trained from"
        )
    if isinstance(ladder_layers, int):
        if not 1 <= ladder_layers <= config.n_layers:
            raise UserError(
                f"--ladder-layers {ladder_layers}: the model has {config.n_layers} layers; give 1 to {config.n_layers}"
            )
        ladder_layers = range(config.n_layers - ladder_layers, config.n_layers)
    return validate(replace(config, variant="ladder", ladder_layers=tuple(sorted(set(ladder_layers)))))


def parse_layers(text: str) -> int | list[int]:
    """Parse --ladder-layers: `16` is a number of layers; `12-31` and `12,14,16-31` are lists. Raises UserError."""
    if text.isdecimal():
        return int(text)
    parts = [re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part) for part in text.split(",")]
    if not all(parts):
        raise UserError(f"--ladder-layers takes a number (16) or a list (12,14,16-31), not {text!r}")
    return [layer for part in parts if part for layer in range(int(part[1]), int(part[2] or part[1]) + 1)]


def convert(model: Path, out: Path, ladder_layers: int | Sequence[int], link: bool = False, force: bool = False) -> ModelConfig:
    """Write the hybrid ladder of checkpoint directory `model` to `out`. Returns its config.

    config.json is written after the weights, so that an interrupted conversion is not mistaken for a checkpoint. link:
    weight files become hard links, which take no space, but a program that writes into one changes both. force: overwrite
    the checkpoint in `out`. Raises UserError; errors in `model` are raised before anything is overwritten.
    """
    config = to_hybrid_ladder(read_config(model / "config.json"), ladder_layers)
    weights = sorted(open_files(model).paths)
    check_source(str(model), config, World(0, 1, torch.device("cpu"), Local()), torch.bfloat16)
    clear(out, model, force)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in tqdm(weights, desc="linking weights" if link else "copying weights", unit="file"):
            (os.link if link else shutil.copyfile)(file.resolve(), out / file.name)
        copy_tokenizer(model, out)
        save_config(hybrid_json(model, config) | add_modeling(out, config), out)
    except OSError as e:
        how = "--link needs one file system; leave it out" if link else "free some space or name another place"
        raise UserError(f"{out} cannot be written ({e.strerror}); {how}") from None
    return config


def hybrid_json(model: Path, config: ModelConfig) -> dict[str, object]:
    """The converted `config.json`: the entries of the original, overwritten by those of `config`."""
    original = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kept = {"torch_dtype": original.get("torch_dtype") or original.get("dtype") or "bfloat16"}
    return original | config_to_hf(config) | kept | {"pad_token_id": original.get("pad_token_id")}


def clear(out: Path, model: Path, force: bool) -> None:
    """Remove an old checkpoint from `out`. Raises UserError if `out` is a file or `model` itself, or if it is not empty
    and `force` is not given."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory")
    if out.exists() and out.resolve() == model.resolve():
        raise UserError("--out is the same directory as --model; name another one")
    if not out.exists() or not any(out.iterdir()):
        return
    if not force:
        raise UserError(f"--out {out} is not empty; name another directory, or overwrite its checkpoint with --force")
    shards = [*out.glob("model-*-of-*.safetensors"), *out.glob("pytorch_model-*-of-*.bin")]
    for file in [out / "config.json", *(out / name for name in WEIGHTS), *shards]:
        file.unlink(missing_ok=True)
    for name in (*TOKENIZER_FILES, MODELING.name):
        (out / name).unlink(missing_ok=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="ORG/NAME|DIR", help="standard checkpoint with config.json"
    )
    parser.add_argument(
        "--ladder-layers", required=True, metavar="K|LIST", help="the last K layers, or a list: 12-31 or 12,14,16-31"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for the converted checkpoint")
    parser.add_argument("--link", action="store_true", help="share the weight files by hard links instead of copying them")
    parser.add_argument("--force", action="store_true", help="overwrite a checkpoint in --out")
    args = parser.parse_args(argv)
    fetch_checkpoint(args)
    return args


def main() -> None:
    args = parse_args()
    config = convert(args.model, args.out, parse_layers(args.ladder_layers), args.link, args.force)
    print(f"{args.out}: {config.description}")


if __name__ == "__main__":
    run(main)

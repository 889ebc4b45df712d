"""Write a checkpoint with random weights in a preset's shape, for measurements of commands that read one.

    python -m scripts.random_checkpoint --model llama-3-70b:2 --out DIR     # two layers, embedding and head
    python -m scripts.quantize --model DIR --out NEW_DIR                    # prints GPTQ's memory and time for a layer

The tokenizer is that of the embedded models, whose ids every preset has. The text of such a model has no meaning.
"""

from pathlib import Path

import torch

from checkpoints.presets import has_random_weights, model_config
from checkpoints.weights import DTYPES, load_model
from cli import Parser, note, run
from comm import Local
from errors import UserError
from options import DTYPE_NAMES
from scripts.lib.results import ROOT
from tp import World
from training.export import save_checkpoint

TOKENIZER = ROOT / "models" / "tiny-standard"


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="PRESET", help="as generate.py takes it")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--variant", help="residual variant, as generate.py takes it (default: the preset's)")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    if not has_random_weights(args.model):
        raise UserError(f"{args.model} has weights already; name a preset")
    if args.out.exists() and any(args.out.iterdir()):
        raise UserError(f"{args.out} has files; name a new folder")
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[args.dtype]
    model = load_model(args.model, model_config(args.model, args.variant, 1), World(0, 1, device, Local()), dtype, args.seed)
    save_checkpoint(model, args.out, dtype, TOKENIZER)
    note(f"wrote {args.out}: {args.model} with random weights")


if __name__ == "__main__":
    run(main)

"""Train the same model as every residual variant for a few hundred steps, and draw the loss curves in one plot.

    python scripts/pretrain_variants.py --model ladder-1b --ranks 8               # on GPUs
    python scripts/pretrain_variants.py --model tiny --ranks 2 --steps 40 --sequence-length 128 --dry-run

The data is the synthetic corpus in the embedded models' tokens, so the curves tell the variants apart and nothing else. Writes
docs/results/pretrain-MODEL.json and .png. A variant that is done is not trained again; --out holds what is there.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli import Parser, note, run
from config import preset
from errors import UserError
from scripts.corpus import encode_corpus
from scripts.results import RESULTS, ROOT, machine, write_json
from tokenizer import load_tokenizer
from training.data import write_tokens
from training.metrics import plot_losses, read_metrics
from training.tokenize_data import fingerprint

VARIANTS = ("standard", "parallel", "ladder", "desync-2x", "desync-4x")
TOKENIZER = ROOT / "models" / "tiny-standard"
TOKENS_PER_DOCUMENT = 90  # on average


def train(args: argparse.Namespace, variant: str, data: Path) -> Path:
    """One variant; its metrics."""
    out = args.out / variant
    if (out / "model" / "config.json").exists():
        return out / "metrics.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    command += ["-m", "training.train", "--model", args.model, "--variant", variant, "--data", str(data), "--out", str(out)]
    command += ["--steps", str(args.steps), "--sequence-length", str(args.sequence_length), "--log-every", "5"]
    command += ["--global-batch", str(args.global_batch), "--micro-batch", str(args.micro_batch), "--save-every", "1000000"]
    command += ["--learning-rate", str(args.learning_rate), "--warmup", str(args.steps // 10), "--tokenizer", str(TOKENIZER)]
    if subprocess.run([*command, *args.more], cwd=ROOT).returncode:
        raise UserError(f"the training of {variant} failed; see above")
    return out / "metrics.jsonl"


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ladder-1b", metavar="PRESET", help="default: ladder-1b")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--sequence-length", type=int, default=2048, metavar="TOKENS", help="default: 2048")
    parser.add_argument("--global-batch", type=int, default=64, metavar="WINDOWS", help="default: 64")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="WINDOWS", help="default: 1")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="default: 3e-4")
    parser.add_argument("--out", type=Path, help="default: out/pretrain-MODEL")
    parser.add_argument("--dry-run", action="store_true", help="train, and write nothing into docs/results")
    parser.add_argument("more", nargs="*", help="after --: further options of python -m training.train, such as --compile")
    args = parser.parse_args()
    preset(args.model)
    args.out = args.out or ROOT / "out" / f"pretrain-{args.model.replace(':', '-')}"
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / "tokens.bin"
    if not data.with_suffix(".json").exists():
        count = args.steps * args.global_batch * args.sequence_length // TOKENS_PER_DOCUMENT
        ids = encode_corpus(TOKENIZER, 1, count + 100, processes=os.cpu_count() or 1)
        write_tokens(data, ids, load_tokenizer(TOKENIZER).vocab_size, fingerprint(TOKENIZER))
    runs = [(variant, train(args, variant, data)) for variant in tqdm(args.variants, desc="variants", unit="model")]
    for variant, path in runs:
        note(f"{variant}: loss {read_metrics(path)[-1]['loss']:.4f}")
    if args.dry_run:
        return
    name = args.out.name
    settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
    write_json(name, {"machine": machine(), "settings": settings, "metrics": {v: read_metrics(p) for v, p in runs}})
    plot_losses(runs, RESULTS / f"{name}.png")
    note(f"wrote {name}.json and .png in {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    run(main)

"""Train the embedded draft heads: an EAGLE-3 head for each of some embedded models, into its folder draft/.

    python -m scripts.corpus.train_drafts                                       # all three
    python -m scripts.corpus.train_drafts --models models/tiny-ladder
    python -m scripts.corpus.train_drafts --steps 200 --tokens 1e6 --out /tmp/try   # a short test on a CPU
    python -m scripts.corpus.train_drafts --measure                             # only measure the heads that are there

The text is the corpus on which the models were trained (`scripts/corpus`). Training takes one and a half minutes a head on an H200, and hours
on a CPU core. Then the model answers held-out documents of each kind greedily, and the head drafts 4 tokens after each verified
one: training.json has the mean number of tokens of such a step by kind: at most 5, and less where answers have few tokens.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from checkpoints.eagle import EagleHead, read_head
from checkpoints.weights import DTYPES
from cli import Parser, note, run
from comms import Local
from engine.llm import LLM
from engine.protocol import SamplingParams
from layers.attention import Causal
from model import Transformer
from scripts.bench.serving.speculation import prompts_of
from scripts.corpus.documents import KINDS
from scripts.corpus.tokens import write_corpus
from tp import World, init_world
from training import draft as command
from training.chains import ChainContext
from training.metrics import read_metrics

MODELS = tuple(Path("models") / name for name in ("tiny-standard", "tiny-ladder", "tiny-hybrid"))
WINDOW = 256  # tokens
RECIPE = ("--learning-rate", "3e-3", "--warmup", "50", "--final-rate", "0.03", "--weight-decay", "0.02")
DRAFTED, NEW_TOKENS = 4, 96  # of a draft and of an answer that is measured
FILES = ("config.json", "model.safetensors")
ALONE = World(0, 1, torch.device("cpu"), Local())


def train(args: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    """Train a head into the model's folder. Returns a record of the training."""
    start, out = time.perf_counter(), args.out / f"draft-{model.name}"
    shutil.rmtree(out, ignore_errors=True)
    argv = ["--model", model, "--data", data, "--out", out, "--steps", args.steps, "--seed", args.seed, "--chain", args.chain]
    argv += ["--sequence-length", WINDOW, "--global-batch", args.batch, "--micro-batch", args.batch, "--log-every", 20, *RECIPE]
    argv += ["--device", args.device] if args.device else []
    settings = command.parse_args([str(a) for a in argv])
    world = init_world(args.device)
    command.train_head(settings, world)
    (model / "draft").mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(out / name, model / "draft" / name)
    lines = read_metrics(out / "metrics.jsonl")
    return dict(
        settings={key: value for key, value in vars(settings).items() if isinstance(value, (int, float))},
        seconds=round(time.perf_counter() - start, 1),
        machine=torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU",
        torch=torch.__version__,
        loss_every_20_steps=[round(line["loss"], 4) for line in lines],
        agreement=[round(share, 4) for share in lines[-1]["agreement"]],
    )


@torch.inference_mode()
def measure(args: argparse.Namespace, model: Path) -> dict[str, float]:
    """Mean tokens of a step by kind of document: the accepted ones of a draft of DRAFTED tokens, and one more, up to the answer's
    end. An answer's first token comes from the prompt's step, which does not count."""
    llm = LLM(model, world=ALONE)
    assert llm.tokenizer is not None
    head = read_head(model / "draft", llm.model.config, ALONE, DTYPES["float32"])
    found = {}
    for kind in tqdm(KINDS, desc=f"measuring {model.name}", disable=None, leave=False):
        prompts = prompts_of(kind, llm.tokenizer, args.documents, args.seed)
        drawn = steps = 0
        for answer in llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0)):
            tokens = answer.prompt_ids + answer.token_ids
            steps += len(accepted_lengths(head, llm.model, tokens, len(answer.prompt_ids), DRAFTED))
            drawn += len(answer.token_ids) - 1
        found[kind] = round(drawn / max(1, steps), 3)
    return found


@torch.inference_mode()
def accepted_lengths(head: EagleHead, model: Transformer, tokens: list[int], start: int, steps: int) -> list[int]:
    """How many tokens of each draft are right, if the model has generated tokens[start:] and each step verifies a draft of `steps`
    tokens. Only tokens after the first generated one are drafted."""
    device = model.norm.weight.device
    ids = torch.tensor([tokens], device=device)
    rows = len(tokens) - 1
    _, streams = model.hidden_and_streams(ids[:, :-1], Causal(rows, device), head.config.stream_layers)
    hidden, token, context = head.fuse(streams), ids[:, 1:], None
    guesses = []
    for _ in range(steps):
        context = ChainContext(rows, device, context)
        hidden = head(head.embed(token, model), hidden, context)
        token = head.guess(hidden)
        guesses.append(token[0])
    drafts, lengths = torch.stack(guesses, 1).tolist(), []
    while start < rows:
        right = [one == other for one, other in zip(drafts[start - 1], tokens[start + 1 :], strict=False)]
        lengths.append([*right, False].index(False))
        start += lengths[-1] + 1
    return lengths


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="+", default=MODELS, help="checkpoints (default: the three embedded ones)")
    parser.add_argument("--steps", type=int, default=700, help="training steps of each head (default: 700)")
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {WINDOW} tokens in a step (default: 64)")
    parser.add_argument("--chain", type=int, default=6, help="tokens of a chain in training (default: 6)")
    parser.add_argument("--tokens", type=float, default=12e6, help="tokens of the corpus (default: 12e6)")
    parser.add_argument("--documents", type=int, default=16, help="documents of each kind that are measured (default: 16)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of corpus, initial weights and order (default: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the token file and the runs (default: out)")
    parser.add_argument("--measure", action="store_true", help="train nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / f"drafts-{args.seed}-{int(args.tokens)}.bin"
    if not args.measure:
        write_corpus(data, args.models[0], args.seed, int(args.tokens))
    for model in args.models:
        path = model / "draft" / "training.json"
        record = json.loads(path.read_text()) if args.measure else train(args, model, data)
        path.write_text(json.dumps(record) + "\n")  # if the measurement is stopped, --measure needs it
        record["tokens_a_step"] = measure(args, model)
        path.write_text(json.dumps(record) + "\n")
        note(f"{path.parent}: tokens a step with drafts of {DRAFTED}: {record['tokens_a_step']}")


if __name__ == "__main__":
    run(main)

"""Train the embedded checkpoints: one model of the same size, tokens and seed for each residual variant.

    python scripts/train_tiny.py --variant hybrid              # one variant, into models/tiny-hybrid
    python scripts/train_tiny.py                               # all six, one after the other
    python scripts/train_tiny.py --tokens 2e6 --out /tmp/try   # a short try on a CPU

The corpus is written anew from its seed (`scripts/corpus.py`), tokenized and packed into windows; the order of windows, the
initial weights and the schedule depend on the seed alone. An H200 takes one and a half to three and a half minutes a variant
for the default 300M tokens, a CPU core most of a day.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention import Causal
from checkpoint import random_weights, save_checkpoint
from comm import Local
from config import ModelConfig, preset, with_variant
from errors import UserError
from model import Transformer
from scripts.corpus import encode_corpus, train_tokenizer

VARIANTS = ("standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x")
STREAMS = 4  # of the desync variants: they then run on 1, 2 and 4 ranks
BOS, EOS = 0, 1
TOKENS_PER_DOCUMENT = 90  # of the corpus, on average; decides how many documents are generated


@dataclass(frozen=True)
class Settings:
    """What the result depends on, beside the variant."""

    tokens: int = 300_000_000
    seed: int = 1
    batch: int = 64  # windows a step
    window: int = 1024  # tokens
    learning_rate: float = 4e-3
    warmup: float = 0.02  # share of the steps
    final_rate: float = 0.05  # of the peak
    weight_decay: float = 0.1
    clip: float = 1.0

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.window))


def tiny_config(variant: str) -> ModelConfig:
    name = f"{variant}:{STREAMS}" if variant.startswith("desync") else variant
    return replace(with_variant(preset("tiny"), name), bos_token_id=BOS, eos_token_ids=(EOS,))


def token_file(path: Path, tokenizer: Path, settings: Settings) -> np.ndarray:
    """The training tokens (uint16), memory-mapped; generated first if the file is not there. Ranks may share it."""
    if not path.exists():
        count = settings.tokens // TOKENS_PER_DOCUMENT
        tokens = encode_corpus(tokenizer, settings.seed, count, processes=os.cpu_count() or 1)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        tokens.tofile(partial)
        partial.rename(path)
    return np.memmap(path, dtype=np.uint16, mode="r")


def batches(tokens: np.ndarray, settings: Settings, device: torch.device) -> Iterator[Tensor]:
    """(batch, window + 1) int64, windows in an order that the seed decides, forever."""
    starts = np.arange(0, len(tokens) - settings.window - 1, settings.window)
    if len(starts) < settings.batch:
        raise UserError(f"{len(tokens)} tokens make no batch of {settings.batch} x {settings.window}; raise --tokens")
    order = np.random.default_rng(settings.seed)
    while True:
        epoch = order.permutation(starts)
        for i in range(0, len(epoch) - settings.batch + 1, settings.batch):
            windows = [tokens[s : s + settings.window + 1] for s in epoch[i : i + settings.batch]]
            yield torch.from_numpy(np.stack(windows).astype(np.int64)).to(device, non_blocking=True)


def initialize(model: Transformer, seed: int) -> None:
    """normal(0, 0.02), the modules' outputs scaled down with depth as in GPT-2."""
    random_weights(model, seed)
    for name, parameter in model.named_parameters():
        if ".wo." in name or ".w_down." in name:
            parameter.data.mul_(1 / math.sqrt(2 * model.config.n_layers))


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to `final_rate` of the peak."""
    warmup = max(1, int(settings.warmup * settings.steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.final_rate + (1 - settings.final_rate) * cosine)


def train(variant: str, tokens: np.ndarray, settings: Settings, device: torch.device) -> tuple[Transformer, list[float]]:
    """Train one variant; returns the model (fp32) and the loss of every 20th step, in nats a token."""
    config = tiny_config(variant)
    model = Transformer(config, Local(), device, torch.float32)
    initialize(model, settings.seed)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [dict(params=matrices, weight_decay=settings.weight_decay), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1], Causal(settings.window, device))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    compiled = torch.compile(loss_of) if device.type == "cuda" else loss_of
    data, losses = batches(tokens, settings, device), []
    progress = tqdm(range(settings.steps), desc=f"training {variant}", unit="step", mininterval=2)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        loss = compiled(next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == settings.steps - 1:
            losses.append(round(loss.item(), 4))
            progress.set_postfix(loss=losses[-1])
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, help="train only this one (default: all)")
    parser.add_argument("--tokens", type=float, default=Settings.tokens, help="training tokens (default: 300e6)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of corpus, initial weights and order (default: 1)")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="windows of 1024 tokens a step (default: 64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for tiny-VARIANT (default: models)")
    parser.add_argument("--prepare", action="store_true", help="write the tokenizer and the token file, then stop")
    parser.add_argument("--data", type=Path, help="token file, made if missing (default: OUT/tokens-SEED-TOKENS.bin)")
    args = parser.parse_args()
    settings = Settings(tokens=int(args.tokens), seed=args.seed, batch=args.batch)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = args.out / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        train_tokenizer(tokenizer, seed=settings.seed)
    data = args.data or args.out / f"tokens-{settings.seed}-{settings.tokens}.bin"
    tokens = token_file(data, tokenizer, settings)
    if args.prepare:
        print(f"{data}: {len(tokens):,} tokens")
        return
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    for variant in [args.variant] if args.variant else VARIANTS:
        start = time.perf_counter()
        model, losses = train(variant, tokens, settings, torch.device(args.device))
        directory = args.out / f"tiny-{variant}"
        save_checkpoint(model, directory, torch.bfloat16, tokenizer_from=tokenizer)
        machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
        record = dict(
            variant=model.config.description,
            settings=asdict(settings),
            tokens_in_corpus=len(tokens),
            seconds=round(time.perf_counter() - start, 1),
            machine=machine,
            torch=torch.__version__,
            loss_every_20_steps=losses,
        )
        (directory / "training.json").write_text(json.dumps(record) + "\n")
        print(f"{directory}: loss {losses[-1]:.4f} after {settings.steps} steps, {record['seconds']} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)

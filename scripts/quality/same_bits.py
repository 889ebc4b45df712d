"""Have prompts the same log-probabilities, to the bit, whatever runs beside, on 1 and on several ranks, and in training?

    python -m scripts.quality.same_bits --device cuda             # 2 GPUs: models/tiny-hybrid and 4 layers of Llama 3 8B, in bfloat16
    python -m scripts.quality.same_bits --device cuda --models llama-3-8b:4,fp8 llama-3-8b:4,int4     # quantized while loading them
    python -m scripts.quality.same_bits --items 24 --models models/tiny-hybrid     # CPU ranks
    python -m scripts.quality.same_bits --items 24 --fast         # without --deterministic, to see that differences are found

Random prompts are answered alone, in batches of several sizes in other orders, and in small chunks with too little memory, where four
that begin alike are found in the prefix cache and sequences are preempted. An eighth of the prompts have 300 to 900 tokens, which is
several segments of attention. A quarter of the answers each is greedy, sampled, sampled with top_p and with a penalty. They are also
answered with drafts, which are the answers with some wrong tokens. The training executor then computes the forward pass of the
prompts with their answers, where the weights are not quantized. A prompt's vector, its answer's tokens and their log-probabilities,
is compared with that of a single request on one rank.

Writes same-bits.json and .md, or of quantized models alone same-bits-quantized, into out (with --write into docs/results). The exit
code is 1 if a vector differs.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from checkpoints.export import save_checkpoint
from checkpoints.presets import has_random_weights, model_config
from checkpoints.weights import DTYPES, build_model, load_model
from cli import Parser, run
from comms import Local
from engine import LLM, SamplingParams
from engine.core import Engine
from engine.draft_costs import FREE
from engine.limits import EngineLimits
from engine.paged_cache import PagedCache
from errors import UserError
from kernels.sampling import log_softmax
from model import Transformer
from options import DTYPE_NAMES, whole_number
from quantized.scheme import SCHEMES
from ranks.processes import on_ranks
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from scripts.sweep.rows import with_widths
from tp import World, init_world
from training.executor import Execution, Executor
from training.losses import head_logits
from training.sharding import Mesh, Sharding

SHORT = 128  # tokens of most prompts and their answers, at most
LENGTH = 1024  # of all
LONG = 300, 900  # tokens of a long prompt, at least and at most
ALIKE = 4  # prompts that begin alike
TAIL = 40  # tokens in which prompts that begin alike differ, at most
TOGETHER = 128  # sequences of a batch, at most
DRAFTED = 4  # tokens of a draft, at most
RIGHT = 0.8  # of the tokens of the texts that drafts are taken from
CHUNKED = EngineLimits(max_model_len=LENGTH, max_num_seqs=32, max_batch_tokens=64)  # and memory for one sequence of LENGTH
SCARCE = 3  # if they are shorter, for so many of a call's longest
ROWS = 16  # prompts of a batch of training
DEFAULT = [("models/tiny-hybrid", None), ("llama-3-8b:4", None)]


class Setting(NamedTuple):
    """A way to answer all prompts."""

    name: str
    batch: int  # requests of a call
    logprobs: bool = True  # without them, and alone, a graph draws the tokens
    engine: str = "whole"  # of `engines_of`: whole prompts, chunked, drafting


SETTINGS = (
    Setting("alone", 1),
    Setting("alone, without log-probabilities", 1, logprobs=False),
    *(Setting(f"in batches of {n}", n) for n in (2, 8, 32, TOGETHER)),
    Setting("in chunks, preempted", 16, engine="chunked"),
    Setting("in batches of 8, with drafts", 8, engine="drafting"),
)
REFERENCE = SETTINGS[0].name


class Vector(NamedTuple):
    """Digests of a prompt's answer, and of it with its log-probabilities."""

    tokens: str
    whole: str | None


def vector(tokens: list[int], logprobs: list[float] | None) -> Vector:
    return Vector(_digest(tokens), None if logprobs is None else _digest([tokens, logprobs]))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def prompts_of(vocab: int, args: argparse.Namespace) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, four of which begin alike, and their parameters; the same in each process."""
    draw, prompts = random.Random(0), list[list[int]]()
    while len(prompts) < args.items:
        least, most = (LONG[0] - 1, LONG[1] - TAIL) if len(prompts) % (8 * ALIKE) == 0 else (0, SHORT - TAIL - args.tokens)
        common = [draw.randrange(vocab) for _ in range(draw.randint(least, most))]
        prompts += [common + [draw.randrange(vocab) for _ in range(draw.randint(1, TAIL))] for _ in range(ALIKE)]
    kinds: list[dict[str, float]] = [{"temperature": 0}, {}, {"top_p": 0.9}, {"presence_penalty": 1.0}]
    params = [SamplingParams(max_tokens=args.tokens, seed=i, ignore_eos=True, **kinds[i % 4]) for i in range(args.items)]  # type: ignore[arg-type]
    return prompts[: args.items], params


# --- what a rank does ----------------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Answer all prompts in each setting, and compute them as training does. Rank 0 writes the vectors by setting, and counts."""
    world = init_world(args.device, overlap="overlapped", deterministic=not args.fast)  # `auto` would measure for a minute
    model = load(args, world)
    prompts, params = prompts_of(model.config.vocab_size, args)
    engines = engines_of(model, world, DTYPES[args.dtype])
    found: dict[str, list[Vector]] = {}
    texts: list[tuple[list[int], list[int]]] = []
    for setting in SETTINGS:
        own = predicting(params, texts, model.config.vocab_size) if setting.engine == "drafting" else params
        answers = answers_of(engines[setting.engine], prompts, own, setting)
        found[setting.name] = [vector(*answer) for answer in answers]
        if setting.name == REFERENCE:
            texts = [(prompt, tokens) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    chunked, drafting = (engine_of(engines[name]).stats() for name in ("chunked", "drafting"))
    counts = {name: getattr(chunked, name) for name in ("prefix_hits", "preemptions", "steps")}
    counts |= {"accepted": sum(source.accepted for source in drafting.drafted.values())}
    del engines
    if args.quantize is None:
        found["in training"] = trained(args, world, model, texts)
    if world.rank == 0:
        args.work.write_text(json.dumps({"vectors": found, "counts": counts}))


def load(args: argparse.Namespace, world: World) -> Transformer:
    return load_model(args.model, model_config(args.model, None, world.world_size, args.quantize), world, DTYPES[args.dtype])


def engines_of(model: Transformer, world: World, dtype: torch.dtype) -> dict[str, LLM]:
    """The engines that the settings name, by name."""
    block = CHUNKED.block_size
    size = PagedCache.bytes_per_block(model.attention_slots, block, model.n_kv_heads, model.config.head_dim, dtype)
    sequence = size * (LENGTH // block)
    whole = EngineLimits(max_model_len=LENGTH, max_num_seqs=TOGETHER, kv_memory=sequence * TOGETHER // 2)
    limits = {
        "whole": whole,
        "chunked": replace(CHUNKED, kv_memory=sequence),
        "drafting": replace(whole, max_num_seqs=8, kv_memory=sequence * 8, draft_tokens=DRAFTED),
    }
    engines = {name: LLM(model, None, world, limits=limit) for name, limit in limits.items()}
    drafting = engines["drafting"]
    drafting.generate([[0]], SamplingParams(max_tokens=1))  # makes the engine
    engine_of(drafting).speculation.costs = FREE  # with measured ones, drafts may not pay
    return engines


def engine_of(llm: LLM) -> Engine:
    assert llm.engine is not None
    return llm.engine


def predicting(params: list[SamplingParams], texts: list[tuple[list[int], list[int]]], vocab_size: int) -> list[SamplingParams]:
    """The parameters with predictions of the answers. Some tokens of each prediction are wrong."""
    draw = random.Random(0)
    guesses = [[t if draw.random() < RIGHT else draw.randrange(vocab_size) for t in tokens] for _, tokens in texts]
    return [msgspec.structs.replace(each, prediction=guess) for each, guess in zip(params, guesses, strict=True)]


def answers_of(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], setting: Setting
) -> list[tuple[list[int], list[float] | None]]:
    """Each prompt's tokens and log-probabilities. The order of the prompts is another one in each setting.

    In chunks, each call has memory for a few of its longest sequences, and finds what it can in the prefix cache. In other settings
    each call computes whole prompts: with a prefix from another setting, it would compare little.
    """
    order = list(range(len(prompts)))
    random.Random(setting.name).shuffle(order)
    if setting.engine == "chunked":  # together those that begin alike, and those of about equal lengths
        order.sort(key=lambda i: (-len(prompts[i // ALIKE * ALIKE]), i // ALIKE))
    held = list[int]()
    found: list[Any] = [None] * len(prompts)
    for first in range(0, len(order), setting.batch):
        own = order[first : first + setting.batch]
        if llm.engine is not None:
            blocks = llm.engine.scheduler.blocks
            if setting.engine == "chunked":
                blocks.release(held)
                room = SCARCE * blocks.blocks_for(max(len(prompts[i]) + params[i].max_tokens for i in own))
                held = [blocks.allocate() for _ in range(len(blocks.free) - room)]
            else:
                blocks.forget(range(blocks.n_blocks))
        each = [msgspec.structs.replace(params[i], logprobs=0 if setting.logprobs else None) for i in own]
        for i, answer in zip(own, llm.generate([prompts[i] for i in own], each), strict=True):
            logprobs = [position.chosen.logprob for position in answer.logprobs] if setting.logprobs else None
            found[i] = answer.token_ids, logprobs
    return found


def trained(
    args: argparse.Namespace, world: World, model: Transformer, texts: list[tuple[list[int], list[int]]]
) -> list[Vector]:
    """The vectors that the forward pass of training gives, with autograd and the weights cut over all ranks."""
    if world.world_size > 1:
        model = load(args, replace(world, rank=0, world_size=1, comm=Local(), control=None))
    model.requires_grad_(True)
    mesh, parameters = Mesh(world.world_size, 1), dict(model.named_parameters())
    sharding = Sharding(mesh, mesh, mesh)
    executor = Executor(model, parameters.__getitem__, world.rank, sharding, mesh, Execution())
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
    found: list[Any] = [None] * len(texts)
    for first in range(0, len(order), ROWS):
        own = order[first : first + ROWS]
        whole = [texts[i][0] + texts[i][1] for i in own]
        longest = max(map(len, whole))
        inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole], device=world.device)
        hidden = executor.forward(inputs)
        for row, i in enumerate(own):
            prompt, tokens = texts[i]
            rows = hidden[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1]
            logprobs = log_softmax(head_logits(model, rows, model.head.weight))
            chosen = logprobs.gather(-1, torch.tensor(tokens, device=world.device)[:, None])[:, 0]
            found[i] = vector(tokens, chosen.tolist())
    executor.close()
    return found


# --- launches --------------------------------------------------------------------------------------------------------------------


@contextmanager
def stored(name: str, args: argparse.Namespace) -> Iterator[str]:
    """The folder of a model. A preset's random weights, which would be others on each rank, are written to a temporary one."""
    if not has_random_weights(name):
        yield name
        return
    one_rank = World(0, 1, torch.device(args.device), Local())
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(name, model_config(name, None, 1), one_rank, DTYPES[args.dtype])
        save_checkpoint(model, Path(folder), DTYPES[args.dtype])
        del model
        torch.cuda.empty_cache()
        yield folder


def launched(model: tuple[str, str | None], folder: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """What so many ranks answer with the model in `folder`. model: its name, and how it is quantized. Raises UserError."""
    name, quantize = model
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*on_ranks(ranks), "-m", "scripts.quality.same_bits", "--work", file.name, "--model", folder]
        command += ["--items", str(args.items), "--tokens", str(args.tokens), "--dtype", args.dtype, "--device", args.device]
        command += [*(["--quantize", quantize] if quantize else []), *(["--fast"] if args.fast else [])]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise UserError(f"{name} on {ranks} ranks failed; see above")
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
    if not all(found["counts"][kind] for kind in ("prefix_hits", "preemptions", "accepted")):
        raise UserError(f"{name}: no prefix was found, no sequence preempted or no draft accepted; give more --items")
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a row for each model, number of ranks and setting."""
    rows, counts = list[dict[str, Any]](), (1, *args.tp)
    for name, quantize in args.models:
        with stored(name, args) as folder:
            found = [launched((name, quantize), folder, ranks, args) for ranks in counts]
        rows += compared(with_widths(name, quantize, "auto"), counts, found)
    return rows


def compared(name: str, ranks: tuple[int, ...], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a model. `differ` lists the prompts whose vector is not that of a single request on one rank."""
    right = found[0]["vectors"][REFERENCE]
    rows = []
    for n, one in zip(ranks, found, strict=True):
        for setting, vectors in one["vectors"].items():
            differ = [
                i
                for i, ((tokens, whole), wanted) in enumerate(zip(vectors, right, strict=True))
                if tokens != wanted[0] or whole not in (None, wanted[1])
            ]
            rows.append(
                {"model": name, "ranks": n, "setting": setting, "prompts": len(vectors), "differ": differ} | one["counts"]
            )
    return rows


def model_and_width(text: str) -> tuple[str, str | None]:
    """Parse a value of `--models`: a model, and how its weights are quantized."""
    name, _, width = text.partition(",")
    if width not in ("", *SCHEMES):
        raise argparse.ArgumentTypeError(f"{text!r} has the unknown width {width!r}; known: {', '.join(SCHEMES)}")
    return name, width or None


def table(rows: list[dict[str, Any]], args: argparse.Namespace, where: dict[str, Any]) -> str:
    head = ["model", "ranks", "prompts answered", "other bits than alone on 1 rank"]
    lines = [
        [Path(row["model"]).name, row["ranks"], row["setting"], f"{len(row['differ'])} of {row['prompts']}"] for row in rows
    ]
    counts = [
        f"{Path(row['model']).name} on {row['ranks']}: {row['prefix_hits']}, {row['preemptions']} and {row['accepted']}"
        for row in rows
        if row["setting"] == REFERENCE
    ]
    caption = (
        f"Answers of {args.tokens} tokens in {args.dtype}{', without --deterministic' if args.fast else ''}. Prompt tokens found in the "
        f"prefix cache and preemptions in chunks, and accepted tokens of drafts: {'; '.join(counts)}. Made on {describe(where, args.device)}."
    )
    return captioned(head, lines, caption)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        type=model_and_width,
        default=DEFAULT,
        metavar="MODEL[,WIDTH]",
        help="checkpoints, or presets with random weights, also quantized while loading them "
        "(default: models/tiny-hybrid llama-3-8b:4)",
    )
    parser.add_argument(
        "--tp",
        nargs="+",
        type=whole_number(2, 8),
        default=[2],
        metavar="N",
        help="numbers of ranks compared with one (default: 2)",
    )
    parser.add_argument("--items", type=whole_number(1), default=1000, metavar="N", help="prompts (default: 1000)")
    parser.add_argument("--tokens", type=whole_number(1, SHORT - 60), default=6, metavar="N", help="of an answer (default: 6)")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--fast", action="store_true", help="without --deterministic; prints the table and writes nothing")
    add_write_option(parser)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # of the ranks
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--quantize", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    folder = None if args.fast else results_folder(args)
    rows, where = measure(args), machine()
    text = table(rows, args, where)
    print(text)
    if folder:
        content = {"machine": where, "device": args.device, "dtype": args.dtype, "tokens": args.tokens, "rows": rows}
        name = "same-bits-quantized" if all(width for _, width in args.models) else "same-bits"
        write_table(name, content, text, folder)
    if any(row["differ"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    run(main)

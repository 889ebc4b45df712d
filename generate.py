"""Generate text, score a text, or chat, on one process or on tensor-parallel ranks.

    python generate.py models/tiny-hybrid --prompt "Once upon a time"
    echo "Once upon a time" | python generate.py models/tiny-hybrid --tp 2
    python generate.py --tp 8 --model llama-3-70b --variant ladder --prompt-length 1024 --max-new-tokens 512
    python generate.py --model models/tiny-hybrid --score --prompt "The cat sat on the mat."

--model takes a checkpoint directory (HF safetensors, or gpt-fast's model.pth and its config.json). It also takes, with
random weights, the name of a preset (`llama-3-70b:16` has 16 of its layers) or a config.json alone (the file, or a
folder that has only this file). Text goes to stdout, everything else to stderr; with --json stdout has exactly one JSON
line for each sample.
"""

import argparse
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch

from checkpoints.hub import fetch_named
from checkpoints.lora import open_adapter
from checkpoints.presets import model_config, warn_of_noise
from checkpoints.weights import DTYPES, chosen_dtype, load_model
from cli import Parser, check_ranks, leave, note, run
from config import ModelConfig, limit_context, require_causal
from engine import LLM, SamplingParams
from engine.draft_models import Draft, find_draft
from engine.llm import WITHOUT_CACHE, Completion, Timing, check_prompts, encode_chat, encode_texts, read_tokenizer
from engine.profiling import annotate, profiled
from errors import UserError
from files import model_name
from kernels import determinism
from layers.linear import ShardedLinear
from model import Transformer
from options import ModelOptions, SpeculationOptions, add_options, rank_options, whole_number
from ranks.processes import is_rank
from text.tokenizer import Tokenizer
from tp import World, agree_on_error, init_world, stream_shards

if TYPE_CHECKING:
    from text.console import Console

INTERACTIVE = "Enter sends, Ctrl-C stops an answer, Ctrl-D ends; /reset starts anew, /help, /exit."
NO_TOKENIZER = (
    "{model} has no tokenizer (a checkpoint's is tokenizer.json or tokenizer.model), so it takes no text; "
    "give --prompt-ids or --prompt-length"
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises UserError for values that exclude each other or mean nothing, and for a model on the hub that cannot be had."""
    parser = Parser(description=__doc__, names_model=True)
    add_options(parser, ModelOptions, "the model", optional=["model"])
    parser.add_argument("--lora", metavar="ORG/NAME|DIR", help="add this LoRA adapter of PEFT to the model")
    add_prompt_options(parser)
    add_generation_options(parser)
    add_options(parser, SpeculationOptions, "speculation")
    add_output_options(parser)
    args = parser.parse_args(argv)
    if not args.model:
        parser.error("no model; give --model, for example models/tiny-hybrid")
    check_args(args)
    fetch_named(args, model="model", speculate="draft", lora="adapter")
    return args


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_argument_group("the prompt, one of").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="- reads standard input, as does a pipe without any of these")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the file's text; - reads standard input")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids, used as they are")
    prompt.add_argument(
        "--prompt-length", type=int, metavar="N", help="N random token ids, other ones for each sequence: for benchmarks"
    )
    prompt.add_argument(
        "--interactive",
        action="store_true",
        help="read prompts from the terminal until Ctrl-D, Ctrl-C stops an answer; with --chat a conversation",
    )
    parser.add_argument(
        "--prompt-lines", action="store_true", help="each line of the text is a prompt of its own; see --batch-size"
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message: apply the checkpoint's chat template"
    )
    parser.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --interactive, remember prompts in ~/.local/state/rung/history ($XDG_STATE_HOME moves it; default: on)",
    )


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("generation")
    out.add_argument("--max-new-tokens", type=whole_number(1), default=200, metavar="N", help="default: 200")
    out.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    out.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default: 0, all)")
    out.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens that reach this probability (default: 1)"
    )
    out.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest one (default: 0)")
    out.add_argument("--seed", type=int, default=0, help="sample i draws with seed + i; also seeds random weights (default: 0)")
    out.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    out.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens whatever is generated")
    out.add_argument("--num-samples", type=whole_number(1), default=1, metavar="N", help="answers to each prompt (default: 1)")
    out.add_argument(
        "--batch-size", type=whole_number(1), default=1, metavar="N", help="how many answers at a time (default: 1)"
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_argument_group("output")
    modes.add_argument(
        "--score", action="store_true", help="generate nothing; print log-probabilities and arg-max of the prompt's tokens"
    )
    modes.add_argument("--json", action="store_true", help="one JSON line for each sample on stdout")
    modes.add_argument("--profile", type=Path, metavar="FILE", help="write a trace of the first batch for ui.perfetto.dev")


def check_args(args: argparse.Namespace) -> None:
    if args.tp is not None:
        check_ranks(args.tp)
    if "" in args.stop:
        raise UserError("--stop is empty, which would end every text at once; give at least one character")
    if args.draft_tokens != SpeculationOptions.draft_tokens and not args.speculate:
        raise UserError("--draft-tokens has no effect here; add --speculate ngram, or leave it out")
    determinism.refuse(args.deterministic, compiled=args.compile, adapters=args.lora)
    if args.lora and args.compile:
        raise UserError("--compile does not compute adapters; leave it or --lora out")
    if args.interactive and (args.score or args.json or args.profile or args.num_samples > 1):
        raise UserError(
            "--interactive gives one answer to each line; it goes without --score, --json, --profile and --num-samples"
        )
    if args.score and (args.profile or args.num_samples > 1):
        raise UserError("--score generates nothing; it goes without --profile and --num-samples")
    if args.score and args.kv_dtype != "auto":
        raise UserError(f"--score {WITHOUT_CACHE}; leave --kv-dtype {args.kv_dtype} out")
    if args.prompt_lines and (args.interactive or args.prompt_ids is not None or args.prompt_length is not None):
        raise UserError("--prompt-lines reads a text; it goes without --prompt-ids, --prompt-length and --interactive")
    if args.chat and (args.prompt_ids is not None or args.prompt_length is not None):
        raise UserError("--chat applies the chat template to a text; it goes without --prompt-ids and --prompt-length")


# --- resolving the command line, before any weights are read -------------------------------------------------------------


@dataclass
class Job:
    """The resolved command line, the same on every rank."""

    args: argparse.Namespace
    config: ModelConfig
    tokenizer: Tokenizer | None
    prompts: list[list[int]]  # one for each sample; empty if interactive
    params: list[SamplingParams]  # one for each sample
    draft: Draft | None = None  # what --speculate names

    @property
    def cache_tokens(self) -> int:
        """The most tokens in the KV cache at once: those of the largest batch, or the model's context if interactive."""
        if self.args.score:
            return 0
        longest = max((len(prompt) for prompt in self.prompts), default=0)
        together = min(self.args.batch_size, len(self.prompts))
        return together * (longest + self.args.max_new_tokens) if self.prompts else self.config.max_seq_len


def prepare(args: argparse.Namespace, world_size: int) -> Job:
    """Read config and tokenizer and encode the prompt. Raises UserError for anything wrong in them."""
    config = limit_context(model_config(args.model, args.variant, world_size, args.quantize), args.max_model_len)
    require_causal(config)
    stream_shards(config, 0, world_size)  # raises UserError if the model cannot be split over the ranks
    if args.lora:
        open_adapter(Path(args.lora), config)
    tokenizer = read_tokenizer(args.model, config)
    if tokenizer is None and args.prompt_ids is None and args.prompt_length is None:
        raise UserError(NO_TOKENIZER.format(model=model_name(args.model)))
    prompts = [] if args.interactive else read_prompts(args, config, tokenizer)
    params = [
        SamplingParams(
            max_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed + i,
            stop=args.stop,
            ignore_eos=args.ignore_eos,
        )
        for i in range(max(1, len(prompts)))
    ]
    if args.profile and not args.profile.parent.is_dir():
        raise UserError(f"--profile {args.profile}: there is no folder {args.profile.parent}; create it or name another")
    check_prompts(config, prompts, [0 if args.score else args.max_new_tokens] * len(prompts))
    draft = find_draft(args.speculate, args.model, config, tokenizer, world_size)
    return Job(args, config, tokenizer, prompts, params, draft)


def read_prompts(args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer | None) -> list[list[int]]:
    """The prompt's token ids for each sample: all samples of a prompt, then those of the next."""
    if args.prompt_length is not None:
        if args.prompt_length < 1:
            raise UserError(f"--prompt-length must be at least 1, not {args.prompt_length}")
        rng = random.Random(args.seed)
        return [[rng.randrange(config.vocab_size) for _ in range(args.prompt_length)] for _ in range(args.num_samples)]
    if args.prompt_ids is not None:
        try:
            ids = [int(i) for i in args.prompt_ids.split(",") if i.strip()]
        except ValueError:
            raise UserError(f"--prompt-ids takes numbers with commas between them (1,2,3), not {args.prompt_ids!r}") from None
        return [ids] * args.num_samples
    text = read_text(args)
    texts = [line for line in text.splitlines() if line.strip()] if args.prompt_lines else [text]
    if not any(texts):
        raise UserError(
            "no prompt, or an empty one; give --prompt, --prompt-file, --prompt-ids, --prompt-length or --interactive"
        )
    return [ids for text in texts for ids in [encode(text, args.chat, tokenizer)] * args.num_samples]


def reads_stdin(args: argparse.Namespace) -> bool:
    named = args.prompt == "-" or str(args.prompt_file) == "-"
    others = (args.prompt, args.prompt_file, args.prompt_ids, args.prompt_length, args.interactive or None)
    return named or (others == (None,) * len(others) and sys.stdin is not None and not sys.stdin.isatty())


def read_text(args: argparse.Namespace) -> str:
    stdin = reads_stdin(args)
    if not stdin and args.prompt_file is None:
        return args.prompt or ""
    try:
        if stdin and is_rank():  # ranks share the offset of a file, see `main`, and cannot share a pipe
            return os.pread(0, os.fstat(0).st_size, 0).decode()
        return sys.stdin.read() if stdin else args.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        what = "standard input" if stdin else f"--prompt-file {args.prompt_file}"
        raise UserError(f"{what} cannot be read as text ({e}); give --prompt, or a file of UTF-8 text") from None


def encode(text: str, chat: bool, tokenizer: Tokenizer | None) -> list[int]:
    assert tokenizer is not None  # `prepare` has refused text without one
    return encode_chat(tokenizer, [{"role": "user", "content": text}]) if chat else encode_texts(tokenizer, [text])[0]


# --- running it ----------------------------------------------------------------------------------------------------------


def answer(
    job: Job, llm: LLM, first: int, show: bool, stopped: Callable[[], bool] | None = None
) -> tuple[list[Completion], Timing]:
    """Generate one batch of samples, from sample `first` on. With `show`, print the first one's text as it is generated.

    `stopped` is called after each step, on all ranks. If it returns True, generation ends, and the `finish_reason` of
    unfinished samples is None.
    """
    chosen = slice(first, first + job.args.batch_size)
    prompts, timing = job.prompts[chosen], Timing()
    answers = [Completion(prompt) for prompt in prompts]
    with closing(llm.stream(prompts, job.params[chosen], timing=timing, answers=answers)) as steps:
        for updates in steps:
            for update in updates:
                if show and update.index == 0:
                    print(update.text, end="", flush=True)
            if stopped is not None and stopped():
                break
    return answers, timing


def samples(job: Job, llm: LLM, world: World) -> Iterator[dict[str, Any]]:
    """Generate all samples and yield the JSON record of each."""
    streamed = job.args.batch_size == 1 and not job.args.json and world.rank == 0 and job.tokenizer is not None
    fastest = 0.0
    for first in range(0, len(job.prompts), job.args.batch_size):
        if streamed:
            show_prompt(job, job.prompts[first])
        with profiled(job.args.profile if first == 0 else None, world.rank):
            outputs, timing = answer(job, llm, first, show=streamed)
        if streamed:
            print()
        speed = measure(llm.model, timing, world)
        for output in outputs:
            yield {
                "text": output.text,
                "token_ids": output.token_ids,
                "prompt_token_ids": output.prompt_ids,
                "finish_reason": output.finish_reason,
                "variant": job.config.description,
                "world_size": world.world_size,
                **speed,
            }
        note(f"[batch {first // job.args.batch_size}] {summary(speed)}")
        fastest = max(fastest, speed["weight_gb_per_second"] or 0.0)
    if fastest and world.rank == 0:
        peak = copy_bandwidth(world.device)
        note(f"A large copy here moves {peak:.1f} GB/s; the weights were read at up to {fastest / peak:.0%} of it.")


def show_prompt(job: Job, prompt: Sequence[int]) -> None:
    """Print the prompt to stderr, so that a terminal shows the whole text; stdout has only the continuation."""
    if job.tokenizer and not job.args.chat and job.args.prompt_length is None:
        text = job.tokenizer.decode([i for i in prompt if i < job.tokenizer.vocab_size])
        note(text, end="" if sys.stdout.isatty() else "\n")


def measure(model: Transformer, timing: Timing, world: World) -> dict[str, float | None]:
    """Speed of one batch, with the median decode step. GB/s and memory are those of this rank. Of a sparse model's experts, as many
    count as read as equally likely choices would have."""
    step = median(timing.steps) if timing.steps else None
    tokens = timing.tokens / len(timing.steps) if timing.steps else 0.0  # of a step
    read = sum(p.numel() * p.element_size() for p in model.parameters())
    if not model.config.tie_embeddings:
        read -= model.embedding.weight.numel() * model.embedding.weight.element_size()  # a lookup reads single rows
    if (experts := model.config.experts) is not None:
        mixed = [m for m in model.modules() if isinstance(m, ShardedLinear) and m.is_mixed]
        unread = (1 - experts.chosen / experts.count) ** tokens
        read -= unread * sum(p.numel() * p.element_size() for module in mixed for p in module.parameters())
    if world.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(world.device) / 1e9
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {
        "prefill_ms": round(timing.prefill * 1e3, 3),
        "decode_ms_per_token": round(step * 1e3, 4) if step else None,
        "tokens_per_second": round(tokens / step, 2) if step else None,
        "weight_gb_per_second": round(read / step / 1e9, 3) if step else None,
        "peak_memory_gb": round(memory, 3),
    }


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large copy on `device`, counting reads and writes, to compare with the GB/s at which weights are read."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() / best / 1e9


def summary(speed: dict[str, float | None]) -> str:
    prefill, memory = f"prefill {speed['prefill_ms']:.1f} ms", f"{speed['peak_memory_gb']:.2f} GB of memory a rank"
    if speed["decode_ms_per_token"] is None:
        return f"{prefill}, {memory}"
    return (
        f"{prefill}, decode {speed['decode_ms_per_token']:.2f} ms a step, {speed['tokens_per_second']:.1f} tokens/s, "
        f"weights read at {speed['weight_gb_per_second']:.1f} GB/s a rank, {memory}"
    )


def print_score(job: Job, llm: LLM, world: World) -> None:
    for prompt in job.prompts:
        scores = llm.score(prompt)
        if world.rank == 0:
            record = {"prompt_token_ids": prompt, "token_logprobs": scores.logprobs, "logits_argmax": scores.argmax}
            print(json.dumps(record | {"variant": job.config.description, "world_size": world.world_size}), flush=True)


def interact(job: Job, llm: LLM, world: World) -> None:
    """Read and answer lines until Ctrl-D. With --chat they form one conversation; without, each line is a new prompt."""
    # Imported here, because other commands need no terminal and should not wait for its library.
    from server.examples import read_examples
    from text.console import Console

    messages: list[dict[str, str]] = []
    examples = read_examples(job.args.model) or {}
    with Console(world, job.args.history) as console:
        note(INTERACTIVE)
        if about := examples.get("about"):
            note(f"{job.args.model} is {about}.")
        if some := examples.get("chat" if job.args.chat else "completion"):
            note(f"Try: {some[0]}")
        while (line := console.line()) is not None and line.strip() not in ("/exit", "/quit"):
            if line.strip() == "/help":
                note(INTERACTIVE)
            elif line.strip() == "/reset":
                messages.clear()
                note("[the conversation starts anew]")
            elif line.strip():
                reply(job, llm, world, console, messages, line)


def reply(job: Job, llm: LLM, world: World, console: "Console", messages: list[dict[str, str]], line: str) -> None:
    """Answer a line, and add the line and the answer to the conversation."""
    assert job.tokenizer is not None
    asked = {"role": "user", "content": line}
    prompt = encode_chat(job.tokenizer, [*messages, asked]) if job.args.chat else encode_texts(job.tokenizer, [line])[0]
    if len(prompt) + job.args.max_new_tokens > job.config.max_seq_len:
        limit = job.config.max_seq_len - job.args.max_new_tokens
        note(f"that makes {len(prompt)} tokens, and {limit} fit; the conversation starts anew")
        messages.clear()
        return
    job.prompts = [prompt]
    outputs, _ = answer(job, llm, 0, show=world.rank == 0, stopped=console.stopped)
    if outputs[0].finish_reason is None:
        note(" [stopped]", end="")
    if world.rank == 0:
        print(flush=True)
    messages += [asked, {"role": "assistant", "content": outputs[0].text}]


def start() -> tuple[Job, World]:
    """Resolve the command line and join the other ranks. An error on one rank is raised on all of them."""
    args = job = error = None
    try:
        args = parse_args()
        job = prepare(args, int(os.environ.get("WORLD_SIZE", 1)))
    except UserError as e:
        error = e
    world = init_world(**rank_options(args), error=error) if args else init_world("cpu", error=error)
    agree_on_error(world, error)
    assert job is not None
    return job, world


def main() -> None:
    if not is_rank() and (args := parse_args()).tp and args.tp > 1:
        from launch import start_ranks  # imported here, because the ranks do not need torch's agent

        with TemporaryFile() as file:
            if reads_stdin(args):  # for the ranks to read it, too
                shutil.copyfileobj(sys.stdin.buffer, file)
                file.flush()
                os.dup2(file.fileno(), 0)
            leave(start_ranks(args.tp, sys.argv))
    job, world = start()
    dtype = DTYPES[chosen_dtype(job.args.dtype, job.args.model, job.config, world)]
    began = time.perf_counter()
    kv_dtype = job.args.kv_dtype
    model = load_model(job.args.model, job.config, world, dtype, job.args.seed, job.cache_tokens, kv_dtype)
    warn_of_noise(job.args.model, job.config)
    quantized = f", {job.config.quantization.description}" if job.config.quantization else ""
    note(
        f"{model_name(job.args.model)}: {job.config.parameter_count() / 1e6:,.0f}M parameters, {job.config.description}, {dtype}{quantized}, "
        f"{world.world_size} rank(s) on {world.device.type} ({world.comm.name}), ready after {time.perf_counter() - began:.1f} s"
    )
    if job.args.profile:
        annotate(model)
    if job.args.compile:
        model.compile_modules()
    speculate = job.draft.name if job.draft else job.args.speculate
    most = job.args.draft_tokens if speculate else None
    llm = LLM(model, job.tokenizer, world, kv_dtype=kv_dtype, speculate=speculate, draft_tokens=most, lora=job.args.lora)
    if job.args.score:
        print_score(job, llm, world)
    elif job.args.interactive:
        interact(job, llm, world)
    else:
        for record in samples(job, llm, world):
            if world.rank == 0 and job.args.json:
                print(json.dumps(record), flush=True)
            elif world.rank == 0 and job.args.batch_size > 1:
                print(f"--- {record['finish_reason']}\n{record['text']}", flush=True)


if __name__ == "__main__":
    run(main)

"""Offline throughput of the serving engine: random prompts, no HTTP.

    python -m engine.bench --model models/tiny-hybrid --requests 64 --prompt-length 64 --new-tokens 64
    python launch.py --ranks 8 -m engine.bench --model llama-3-70b:16 --requests 256 --prompt-length 1024 \\
        --new-tokens 512

With --host it prints the host's time in a step instead: scheduling, batch layout, sampling set-up, bookkeeping. With --trace it
also profiles some steps and prints the shares of their time by kind of kernel, and in which no kernel ran. `idle_share` is what the engine itself measures.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from checkpoints.hub import fetch_named
from checkpoints.presets import model_config
from checkpoints.weights import DTYPES, chosen_dtype, load_model
from cli import Parser, run
from engine.core import Engine
from engine.draft_models import find_draft
from engine.limits import EngineLimits
from engine.profiling import gpu_time, kernel_idle_share, profiled, read_trace
from engine.protocol import SamplingParams, Submit
from errors import UserError
from options import ModelOptions, SpeculationOptions, add_options, rank_options, whole_number
from tp import World, init_world

TRACED = range(20, 100)  # steps that --trace profiles


def submit_all(engine: Engine, args: argparse.Namespace) -> None:
    """Submit random prompts without stop tokens: every request generates all its tokens. Raises UserError if they do not fit."""
    rng = random.Random(args.seed)
    params = SamplingParams(max_tokens=args.new_tokens, temperature=args.temperature)
    for i in range(args.requests):
        prompt = [rng.randrange(engine.vocab_size) for _ in range(args.prompt_length)]
        if refused := engine.submit(Submit(str(i), prompt, params)):
            raise UserError(refused.message)


def throughput(engine: Engine, args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Run all requests to their end and measure the throughput."""
    submit_all(engine, args)
    start = time.perf_counter()
    steps: list[float] = []
    idle: list[float] = []  # seconds for which the device has waited, before each step
    bar = tqdm(total=args.requests * args.new_tokens, unit="token", disable=world.rank > 0)
    with ExitStack() as tracing:
        while engine.has_work():
            if len(steps) == TRACED.start:
                tracing.enter_context(profiled(args.trace if world.rank == 0 else None, 0, host=False))
            if len(steps) == TRACED.stop:
                tracing.close()
            idle.append(engine.runner.idle_seconds)
            begin = time.perf_counter()
            bar.update(sum(len(output.token_ids) for output in engine.step()))
            steps.append(time.perf_counter() - begin)
    bar.close()
    seconds = time.perf_counter() - start
    if args.trace and len(steps) < TRACED.start + 5:
        raise UserError(f"--trace: the run has {len(steps)} steps, too few; give more --requests or --new-tokens")
    traced = traced_shares(args.trace, idle, steps) if args.trace and world.rank == 0 else {}
    return traced | {
        "requests": args.requests,
        "prompt_length": args.prompt_length,
        "new_tokens": args.new_tokens,
        "world_size": world.world_size,
        "communicator": world.comm.name,
        "seconds": round(seconds, 3),
        "generated_tokens_per_second": round(args.requests * args.new_tokens / seconds, 1),
        "tokens_per_second": round(args.requests * (args.prompt_length + args.new_tokens) / seconds, 1),
        "steps": len(steps),
        "max_batch_tokens": engine.scheduler.max_batch_tokens,
        "median_step_ms": round(median(steps) * 1e3, 3),
        "p99_step_ms": round(sorted(steps)[int(0.99 * len(steps))] * 1e3, 3),
        "preemptions": engine.scheduler.preemptions,
        "idle_share": None if engine.runner.graphs is None else round((engine.runner.idle_seconds - idle[0]) / seconds, 4),
    }


def traced_shares(path: Path, idle: list[float], steps: list[float]) -> dict[str, Any]:
    """The idle shares of the steps that were profiled: without a kernel in the trace, and as the engine measures it; and the shares
    of their time by kind of kernel. idle, steps: seconds for which the device had waited before each step, and those of each step."""
    # a step's wait, the first one's for the profiler, is counted two steps later
    measured = range(TRACED.start + 3, min(TRACED.stop, len(steps)) - 1)
    seconds = sum(steps[i] for i in measured)
    metric = (idle[measured.stop] - idle[measured.start]) / seconds
    events = read_trace(path)["traceEvents"]
    share, time = kernel_idle_share(events), gpu_time(events)
    return {
        "traced_steps": min(TRACED.stop, len(steps)) - TRACED.start,
        "traced_kernel_idle_share": None if share is None else round(share, 4),
        "traced_idle_share": round(metric, 4),
        "traced_shares": time and {kind: round(us / time.step_us, 4) for kind, us in time.by_kind.items()},
    }


def timed(owner: Any, name: str, label: str, seconds: dict[str, float]) -> None:
    """Replace a method by one that also adds its time to `seconds[label]`."""
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds[label] += time.perf_counter() - start

    setattr(owner, name, outer)


def host_overhead(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """The host's time in a decode step of all requests, in ms: medians over the steps.

    `host` is the step without the model (layers, head) and without the drawing of tokens from logits. The entries after
    it are parts of it. On a CPU only: a GPU's step is one call. Raises UserError if no step decodes all requests.
    """
    seconds: dict[str, float] = defaultdict(float)
    model, runner = engine.runner.model, engine.runner
    parts = [
        (engine, "step", "step"),
        (model, "hidden_and_streams", "layers"),
        (model, "logits", "head"),
        (runner, "_sample", "draw"),
        (engine.scheduler, "schedule", "scheduling"),
        (runner.spans, "write", "batch layout"),
        (runner.spans, "context", "batch layout"),
        (runner, "_batch", "sampling set-up"),
    ]
    for owner, name, label in parts:
        timed(owner, name, label, seconds)
    submit_all(engine, args)
    rows: list[dict[str, float]] = []
    while engine.has_work():
        seconds.clear()
        if len(engine.step()) == args.requests:
            rows.append(dict(seconds))
    if not rows:
        raise UserError(f"no step decoded all {args.requests} requests; give fewer --requests, or more --max-num-seqs")
    for row in rows:
        row["host"] = row["step"] - row["layers"] - row["head"] - row["draw"] + row["sampling set-up"]
    named = ("step", "layers", "head", "draw", "host", "scheduling", "batch layout", "sampling set-up")
    return {"batch": args.requests, "steps": len(rows)} | {
        name + "_ms": round(median(row[name] for row in rows) * 1e3, 4) for name in named
    }


def check_trace(args: argparse.Namespace) -> None:
    """Raise UserError if --trace cannot be written, or does not go with the other flags."""
    if args.trace and args.host:
        raise UserError("--trace does not go with --host, which measures a CPU; give one of them")
    if args.trace and not args.trace.parent.is_dir():
        raise UserError(f"--trace {args.trace}: the folder {args.trace.parent} does not exist; create it or name another")


def add_load(parser: argparse.ArgumentParser, requests: int = 64, prompt_length: int = 64, new_tokens: int = 64) -> None:
    """Add the flags of the requests, with these defaults."""
    add = parser.add_argument
    add("--requests", type=whole_number(1), default=requests, help=f"all submitted at once (default: {requests})")
    add("--prompt-length", type=whole_number(1), default=prompt_length, help=f"tokens (default: {prompt_length})")
    add("--new-tokens", type=whole_number(1), default=new_tokens, help=f"tokens a request (default: {new_tokens})")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--max-num-seqs", type=whole_number(1), default=256, help="sequences in a step (default: 256)")
    add("--seed", type=int, default=0)


def main() -> None:
    parser = Parser(description=__doc__)
    add_options(parser, ModelOptions, "the model", without=("tp", "max_model_len", "compile"))
    add_options(parser, SpeculationOptions, "speculation")
    add_load(parser)
    parser.add_argument("--max-batch-tokens", type=whole_number(1), help="tokens in a step (default: as the server)")
    parser.add_argument("--block-size", type=whole_number(1), default=16, help="tokens of a KV-cache block (default: 16)")
    parser.add_argument("--host", action="store_true", help="print the host's share of a decode step")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=f"write a profiler trace of the GPU in steps {TRACED.start} to {TRACED.stop - 1}, for ui.perfetto.dev, and print its "
        "shares by kind of kernel and in which the GPU is idle; the profiler makes the run slower",
    )
    args = parser.parse_args()
    check_trace(args)
    fetch_named(args, model="model", speculate="draft")
    world = init_world(**rank_options(args))
    if args.trace and world.device.type != "cuda":
        raise UserError("--trace shows when a GPU is idle, so it needs a GPU; leave it out on a CPU")
    config = model_config(args.model, args.variant, world.world_size, args.quantize)
    dtype = DTYPES[chosen_dtype(args.dtype, args.model, config, world)]
    draft = find_draft(args.speculate, args.model, config, None, world.world_size)
    model = load_model(args.model, config, world, dtype)
    limits = EngineLimits.of(args)
    engine = Engine(model, None, limits, world, draft.load(world, dtype) if draft else None)
    engine.capture()
    with torch.inference_mode():
        result = host_overhead(engine, args) if args.host else throughput(engine, args, world)
    if world.rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    run(main)

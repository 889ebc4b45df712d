"""The plans for some GPUs: their memory, the largest load of each, and the latencies at it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploy.plan.load import Answers, Goals, at_rate, highest_rate, largest_rate
from deploy.plan.steps import RESULTS, Setup, Steps, Tables, gpu, read_rows, setup_of
from engine.limits import STEP_TOKENS, EngineLimits, default_memory
from errors import UserError

RESERVE = 2e9  # bytes of a GPU for CUDA's context and NCCL, for which there is no formula
SMALLEST_BATCH = 4
LIGHT = 1e-3  # share of the highest rate, at which requests hardly meet
GAIN = 1.01  # by which a smaller batch must raise the load, or no even smaller one is tried


def measured(more: Sequence[Path] = ()) -> Tables:
    """The tables of docs/results and of more files. Sweeps with profiles repeat others with fewer runs."""
    known = (path for path in sorted(RESULTS.glob("*/*.jsonl")) if not path.name.startswith("profile"))
    return Tables(read_rows([*known, *more]))


def largest_batch(setup: Setup, tokens: int, most: int) -> int:
    """How many sequences of `tokens` tokens the KV cache holds besides the weights, as `--kv-memory` allots it, up to
    `most`."""
    free = default_memory(setup.gpu.memory - RESERVE - setup.weights)
    block = EngineLimits.block_size
    return max(0, min(most, int(free // (-(-tokens // block) * block * setup.kv_bytes))))


def candidates(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All plans that `args` allows and that fit into memory, the one with the largest load first. Raises UserError if none
    fits."""
    tables = measured(args.sweeps)
    setups, refused = list[Setup](), list[str]()
    for width in args.widths:
        for variant in args.variants:
            for tp in args.tp:
                try:
                    setup = setup_of(args.model, gpu(args.gpu), variant, tp, None if width == "bf16" else width)
                    if setup.layer in {other.layer for other in setups}:
                        continue  # as on one rank, where all variants take equally long; the first stands for them
                    if largest_batch(setup, args.prompt + args.answer, args.max_num_seqs):
                        setups.append(setup)
                    else:
                        weights = f"{setup.weights / 1e9:.1f} of {setup.gpu.memory / 1e9:.0f} GB"
                        refused.append(f"the weights of tp {tp} with {setup.width} take {weights}")
                except UserError as e:
                    refused.append(str(e))
    if not setups:
        raise UserError(f"no plan is possible: {'; '.join(dict.fromkeys(refused))}")
    plans = [_plan(args, tables, setup) for setup in setups]
    return sorted(plans, key=lambda plan: -plan["requests_per_second"])


def _plan(args: argparse.Namespace, tables: Tables, setup: Setup) -> dict[str, Any]:
    """The batch with the largest load. Batches are tried from the largest one that fits, each half of the one before."""
    goals, replicas = Goals(args.ttft / 1e3, args.itl / 1e3, args.share), args.gpus // setup.tp
    budget = args.max_batch_tokens or STEP_TOKENS
    largest = largest_batch(setup, args.prompt + args.answer, args.max_num_seqs)
    rate, steps = 0.0, Steps(tables, setup, largest, budget)
    tried = steps
    while found := largest_rate(tried, args.prompt, args.answer, goals, args.seed, rate * GAIN):
        rate, steps = found, tried
        if steps.most // 2 < SMALLEST_BATCH:
            break
        tried = Steps(tables, setup, steps.most // 2, budget)
    light = LIGHT * highest_rate(steps, args.prompt, args.answer)
    answers = at_rate(steps, rate or light, args.prompt, args.answer, args.seed)
    return {
        "tp": setup.tp,
        "replicas": replicas,
        "width": setup.width,
        "variant": setup.variant,
        "batch": steps.most,
        "requests_per_second": round(rate * replicas, 3),
        "tokens_per_second": round(rate * replicas * args.answer, 1),
        **_latencies(answers),
        "weights_gb": round(setup.weights / 1e9, 2),
        "largest_batch": largest,
        "times": tables.source(setup),
    }


def _latencies(answers: Answers) -> dict[str, dict[str, float]]:
    """Percentiles of the time to the first token and of answers' mean time between tokens, ms."""
    figures = {"ttft_ms": answers.first[answers.steady], "itl_ms": answers.mean_gap[answers.steady]}
    return {name: {f"p{p}": round(float(np.percentile(x, p)) * 1e3, 2) for p in (50, 90, 99)} for name, x in figures.items()}

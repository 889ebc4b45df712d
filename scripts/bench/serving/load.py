"""Send requests to a server at random times, at given rates, and measure their latency: an open-loop load generator.

    python -m scripts.bench.serving.load --model models/tiny-hybrid --ranks 2 --rates 1 2 4 --requests 64 --offline
    python -m scripts.bench.serving.load --model llama-3-70b --ranks 4 --rates 4 16 32 64 --prompt-length 1024 --new-tokens 256 --seconds 10 --drain 5
    python -m scripts.bench.serving.load --model llama-3-70b --clients 1 4 16 64 --requests 4 --speculate random-head --accept-rate 0.75
    python -m scripts.bench.serving.load --url http://127.0.0.1:8000 --vocab-size 32000 --rates 8 --ttft-limit 200 --itl-limit 20

Arrivals are a Poisson process drawn in advance from --seed, so a slow server does not delay the next request. All times count
from the moment at which a request should have been sent. For every rate it prints percentiles of the time to the first token
(TTFT), between tokens (ITL) and to the end, the goodput (requests a second that met both limits), and of Rung on a GPU the
share of the steps' time in which the GPU waited for the host. Without --url it starts its own server for --model, a
checkpoint or a preset with random weights. --seconds and --drain bound the time per rate. With --offline it also runs
`engine.bench` on the same lengths, all requests at once and without HTTP. That throughput is an upper bound for every rate.
Prompts are random token ids, others at each rate and in each run, and answers continue past EOS.

With --clients there are no arrivals: each of so many clients sends --requests, the next one when it has the last answer.
--speculate is the server's. Of models with random weights no draft is right, so --accept-rate simulates an acceptance rate.
"""

import argparse
import asyncio
import gc
import json
import math
import random
import re
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import uvloop

from checkpoints.hub import fetch_named
from checkpoints.presets import has_random_weights, model_config
from cli import Parser, note, run
from errors import UserError
from options import ModelOptions, SpeculationOptions, StandInOptions, add_options, whole_number
from ranks.ports import free_port
from ranks.processes import on_ranks
from scripts.lib import markdown
from scripts.lib.load_generator import Range, keep_busy, offer, plan, summary
from scripts.lib.machine import machine
from scripts.lib.markdown import Columns
from scripts.lib.results import ROOT, check_output, write_text
from scripts.lib.servers import Server, is_healthy, rung_server, running
from scripts.lib.sse_client import StreamClient, parse_url
from scripts.lib.vllm_model import QUANTIZES, add_vllm_memory, write_model

UNSHARED = ("tp", "max_model_len", "compile")  # model options that `engine.bench` does not take
STEP_SECONDS = ("engine_step_seconds", "gpu_idle_seconds")  # metrics of the server
DRAFTS = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
STATS_SECONDS = 0.5  # until the server's metrics have the last steps: the engine sends them every 0.25 s
SPREADS = {  # of latencies, by their names in a summary
    "ttft_ms": "TTFT, ms: p50 / p90 / p99",
    "itl_ms": "ITL, ms: p50 / p90 / p99",
    "end_to_end_ms": "end to end, ms: p50 / p90 / p99",
}
HEALTHY_SECONDS = 120.0  # time limit for the server of --url to answer


def parse_range(text: str) -> Range:
    """Parse a number of tokens (`64`) or a range (`16-128`). Raises UserError."""
    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise UserError(f"{text!r} is no length; give a number of tokens, or a range such as 16-128")
    return int(low), int(high or low)


def table(result: dict[str, Any]) -> str:
    """A Markdown table with one line per rate or number of clients, and a caption if agreement was not real. Cells with three figures
    hold p50, p90 and p99."""
    rate = result["settings"].get("accept_rate")
    caption = "" if rate is None else f"A drafted token counts as right with probability {rate:g}: agreement is not real."
    return markdown.table(columns(result), result.get("clients") or result["rates"], caption).rstrip("\n")


def columns(result: dict[str, Any]) -> Columns:
    def spread(name: str) -> Callable[[Any], str]:
        return lambda one: " / ".join(f"{ms:.1f}" for ms in (one["summary"][name] or {}).values())

    shared: Columns = {
        "tokens/s": "{summary[tokens_per_second]:.1f}",
        **{title: spread(name) for name, title in SPREADS.items()},
    }
    failed: Columns = {"failed": lambda one: f"{sum(one['summary']['failed'].values())} of {one['summary']['requests']}"}
    if "clients" in result:
        accepted: Columns = {
            "accepted of a draft": lambda one: f"{one['accepted'] / one['drafts']:.2f}" if one["drafts"] else "–"
        }
        return {"clients": "{clients}", **shared, **accepted, **failed}
    limits = "goodput, TTFT ≤ {ttft_limit:g} ms, ITL ≤ {itl_limit:g} ms".format_map(result["settings"])
    idle: Columns = {}
    if any(one.get("gpu_idle_share") is not None for one in result["rates"]):
        idle = {"GPU idle": lambda one: "" if one["gpu_idle_share"] is None else f"{one['gpu_idle_share']:.1%}"}
    offered = {"offered, requests/s": "{rate:g}", "served, requests/s": "{summary[requests_per_second]:.2f}"}
    return {**offered, **shared, limits: "{summary[goodput]:.2f}", **failed, **idle}


# --- the server, and the engine without it -------------------------------------------------------------------------------


def shared_flags(args: argparse.Namespace) -> list[str]:
    """The flags that the server and `engine.bench` both take."""
    names = [one.name for one in fields(ModelOptions) if one.name not in UNSHARED] + ["max_num_seqs", "max_batch_tokens"]
    chosen = {"--" + name.replace("_", "-"): getattr(args, name) for name in names}
    given = {flag: value for flag, value in chosen.items() if value is not None and value is not False}
    return [str(part) for flag, value in given.items() for part in ((flag,) if value is True else (flag, value))]


@contextmanager
def vllm_server(args: argparse.Namespace, log: Path) -> Iterator[Server]:
    """As `rung_server`, with vLLM's server and random weights."""
    port = free_port()
    lengths = args.prompt_length[1] + args.new_tokens[1]
    with tempfile.TemporaryDirectory() as folder:
        quantization = write_model(Path(folder), args.model, args.ranks, args.quantize)
        command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", folder, "--load-format", "dummy", "--skip-tokenizer-init"]
        command += ["--tensor-parallel-size", str(args.ranks)]
        command += ["--dtype", args.dtype or "bfloat16", "--max-model-len", str(lengths), "--no-enable-prefix-caching"]
        command += ["--generation-config", "vllm", "--disable-uvicorn-access-log", "--kv-cache-dtype", args.kv_dtype]
        if quantization:
            command += ["--quantization", quantization]
        if args.vllm_memory:
            command += ["--gpu-memory-utilization", str(args.vllm_memory)]
        if args.max_num_seqs:
            command += ["--max-num-seqs", str(args.max_num_seqs)]
        if args.max_batch_tokens:
            command += ["--max-num-batched-tokens", str(args.max_batch_tokens)]
        with running(command, port, log) as server:
            yield server


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of a server that is ready: that of --url, or that of our own server, which is stopped at the end."""
    log = args.out.with_suffix(".log")
    if args.url:
        parse_url(args.url)
        if not is_healthy(args.url, HEALTHY_SECONDS):
            raise UserError(f"the server at {args.url} was not healthy within {HEALTHY_SECONDS:.0f} s")
        yield args.url
    elif args.vllm_python:
        with vllm_server(args, log) as server:
            yield server.url
    else:
        flags = [*shared_flags(args), "--max-queue", str(max(args.requests, *args.clients or [0]))]
        for name in ("speculate", "draft_tokens", "accept_rate"):
            if (value := getattr(args, name)) is not None:
                flags += ["--" + name.replace("_", "-"), str(value)]
        with rung_server(args.ranks, flags, log) as server:
            yield server.url


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """The result of `engine.bench` with the same number of requests, all of the mean lengths. Raises UserError."""
    lengths = [sum(bounds) // 2 for bounds in (args.prompt_length, args.new_tokens)]
    command = [*on_ranks(args.ranks), "-m", "engine.bench", "--requests", str(args.requests)]
    command += ["--prompt-length", str(lengths[0]), "--new-tokens", str(lengths[1]), *shared_flags(args)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError("engine.bench failed; what it said stands above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def step_seconds(url: str) -> tuple[float, float] | None:
    """Seconds of the server's steps so far, and those of them in which its GPU waited for the host. None if it does not say."""
    with suppress(httpx.HTTPError):
        steps, idle = totals(url, STEP_SECONDS)
        if steps and idle:
            return steps[0], idle[0]
    return None


def totals(url: str, names: Sequence[str]) -> list[list[float]]:
    """The values of each of these counters of a server: one for each set of labels, none if it does not have the counter. Raises
    httpx.HTTPError."""
    text = httpx.get(url.rstrip("/") + "/metrics", trust_env=False).text
    return [[*map(float, re.findall(rf"^rung:{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE))] for name in names]


def idle_share(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """The share of the steps' time between two `step_seconds` in which the GPU waited. None if a server does not say, or had no
    step."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    return round((after[1] - before[1]) / (after[0] - before[0]), 4)


async def measure(args: argparse.Namespace, url: str, vocab_size: int) -> list[dict[str, Any]]:
    """Measure every rate, or every number of clients, in turn, after a few warm-up requests."""
    found, words = list[dict[str, Any]](), random.Random(args.prompt_seed)
    shape = (args.prompt_length, args.new_tokens, vocab_size)
    more = {"detokenize": False} if args.vllm_python else {}  # `vllm_server` starts without a tokenizer
    async with StreamClient(url, args.timeout) as client:
        warm_up = plan(args.rates[0], min(4, args.requests), *shape, args.seed + 1, words)
        await (keep_busy(client, warm_up, 2, "warm-up") if args.clients else offer(client, warm_up, "warm-up", more=more))
        gc.collect()
        gc.freeze()  # the garbage collector then skips the imported modules, so that it adds no delay between tokens
        for clients in args.clients or ():
            requests = plan(1.0, clients * args.requests, *shape, args.seed, words)
            before = drafted(url)
            answers = await keep_busy(client, requests, clients, f"{clients} clients")
            await asyncio.sleep(STATS_SECONDS)
            drafts, accepted = (now - then for now, then in zip(drafted(url), before, strict=True))
            one = {"clients": clients, "drafts": drafts, "accepted": accepted}
            found.append(one | {"summary": summary(answers, args.ttft_limit, args.itl_limit)})
        for rate in () if args.clients else args.rates:
            requests = plan(rate, args.requests, *shape, args.seed, words, args.seconds)
            steps = step_seconds(url)
            answers = await offer(client, requests, f"{rate:g} requests/s", args.drain, more)
            await asyncio.sleep(STATS_SECONDS)
            share = idle_share(steps, step_seconds(url))
            found.append({"rate": rate, "summary": summary(answers, args.ttft_limit, args.itl_limit), "gpu_idle_share": share})
    return found


def drafted(url: str) -> tuple[int, int]:
    """How many drafts the server has verified so far, and how many of their tokens were accepted."""
    drafts, accepted = (round(sum(found)) for found in totals(url, DRAFTS))
    return drafts, accepted


def add_server_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ModelOptions, "the model", without=UNSHARED, optional=("model",))
    add_options(parser, SpeculationOptions, "speculation")
    add_options(parser, StandInOptions, "benchmarks of speculation")
    what = parser.add_argument_group("the server")
    what.add_argument("--url", help="URL of a server that is running (default: start one)")
    what.add_argument("--vocab-size", type=int, metavar="N", help="draw the ids of prompts below N; needed with --url")
    what.add_argument(
        "--vllm-python",
        metavar="PYTHON",
        help="serve --model with vLLM and random weights; PYTHON is the interpreter of an environment with vLLM",
    )
    add_vllm_memory(what)
    what.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    what.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences in a step")
    what.add_argument("--max-batch-tokens", type=int, metavar="N", help="most tokens in a step")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[1.0, 2.0, 4.0],
        metavar="R",
        help="arrival rates in requests/s (default: 1 2 4)",
    )
    load.add_argument(
        "--clients", nargs="+", type=whole_number(1), metavar="N", help="numbers of clients, instead of --rates (default: none)"
    )
    load.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="most requests at each rate (default: 64; with --seconds, all that arrive), or of each client",
    )
    load.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="end the arrivals of each rate after S seconds (default: no limit)",
    )
    load.add_argument(
        "--drain",
        type=float,
        metavar="S",
        help="cut off requests that still run S seconds after the last arrival (default: wait for all)",
    )
    load.add_argument(
        "--prompt-length", default="64", metavar="N|A-B", help="prompt tokens, one number or a range (default: 64)"
    )
    load.add_argument(
        "--new-tokens", default="32", metavar="N|A-B", help="generated tokens, one number or a range (default: 32)"
    )
    load.add_argument("--seed", type=int, default=0, help="random seed of arrivals and lengths (default: 0)")
    load.add_argument(
        "--timeout", type=float, default=600, help="a request fails after this many seconds without a byte (default: 600)"
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("what to report")
    out.add_argument(
        "--ttft-limit", type=float, default=1000, metavar="MS", help="goodput: longest time to the first token (default: 1000)"
    )
    out.add_argument(
        "--itl-limit", type=float, default=100, metavar="MS", help="goodput: longest mean time between tokens (default: 100)"
    )
    out.add_argument("--offline", action="store_true", help="run engine.bench first, with the same lengths")
    out.add_argument("--out", type=Path, default=ROOT / "out" / "load.json", help="JSON file to write (default: out/load.json)")


def check(args: argparse.Namespace) -> None:
    """Raise UserError for flags that contradict each other, or a number outside its range."""
    if (args.url is None) == (args.model is None):
        raise UserError("give --model to start a server, or --url of one that runs")
    if args.url and (args.vocab_size is None or args.offline):
        raise UserError("--url needs --vocab-size, and goes without --offline")
    if args.vllm_python and (args.url or args.variant or args.comm or args.offline or not has_random_weights(args.model)):
        raise UserError(
            "--vllm-python serves a --model with random weights, and goes without --url, --variant, --comm and --offline"
        )
    if args.vllm_python and args.quantize not in (None, *QUANTIZES):
        raise UserError(f"vLLM is not measured with {args.quantize}, only with {' and '.join(QUANTIZES)}")
    if args.offline and args.requests is None and args.seconds < math.inf:
        raise UserError("--offline with --seconds also needs --requests, because it sends all requests at once")
    if args.clients and (args.offline or args.vllm_python or args.seconds < math.inf or args.drain is not None):
        raise UserError("--clients goes without --offline, --vllm-python, --seconds and --drain")
    if args.vllm_python and args.speculate:
        raise UserError("--vllm-python goes without --speculate")
    if min(args.rates) <= 0 or args.seconds <= 0 or (args.drain is not None and args.drain < 0):
        raise UserError("--rates and --seconds must be above 0, and --drain not below")
    if args.ranks < 1 or (args.requests is not None and args.requests < 1):
        raise UserError("--requests and --ranks must be at least 1")


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_server_options(parser)
    add_load_options(parser)
    add_report_options(parser)
    args = parser.parse_args()
    args.prompt_length, args.new_tokens = parse_range(args.prompt_length), parse_range(args.new_tokens)
    check(args)
    fetch_named(args, model="config" if args.url else "model")
    args.prompt_seed = secrets.randbits(32)  # another in each run, also against the same server: see `plan`
    if args.requests is None:
        args.requests = 64 if args.seconds == math.inf else math.ceil(2 * max(args.rates) * args.seconds) + 16
    return args


def main() -> None:
    args = parse_args()
    vocab_size = args.vocab_size or model_config(args.model, args.variant, args.ranks).vocab_size
    check_output(args.out)
    settings = {k: None if v == math.inf else v for k, v in vars(args).items() if k not in ("out", "vllm_python")}
    settings["server"] = "vLLM" if args.vllm_python else "Rung"
    result: dict[str, Any] = {"settings": settings}
    if args.offline:
        result["offline"] = offline(args)
        note(f"all at once, without HTTP: {result['offline']['generated_tokens_per_second']:.1f} tokens/s")
    with serving(args) as url:
        result["clients" if args.clients else "rates"] = uvloop.run(measure(args, url, vocab_size))
    result["machine"] = machine()  # last: it initializes CUDA, and the server uses the GPUs' memory until it ends
    write_text(args.out, json.dumps(result, separators=(",", ":")) + "\n")
    print(table(result))
    note(f"wrote {args.out}")


if __name__ == "__main__":
    run(main)

"""Split the time of a step into computation, hidden and exposed communication, and on a GPU by kind of kernel.

    python launch.py --ranks 2 -m scripts.trace --model models/tiny-ladder --out out/trace.json
    python -m scripts.trace --read out/trace.json               # the table of an existing trace

Profiles one prefill, until each sequence has its first token, and some decode steps of all sequences after a warm-up run, and writes
rank 0's trace for ui.perfetto.dev. The trace has an additional process `overlap`, which shows all communication as either hidden or
exposed. On a GPU, kernels count as communication by their names (NCCL, symmetric memory); on a CPU, gloo's collectives do. Everything
else that runs counts as computation.

Of a GPU it also prints, for the prefill and a mean decode step, the time by kind (attention, GEMM, norm and all-reduce, other,
idle) and by kernel. The parts add up to the step: while several kernels run, the time counts for the one that began first.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.profiler import record_function

from checkpoints.hub import fetch_named
from checkpoints.presets import model_config
from checkpoints.weights import DTYPES, load_model
from cli import Parser, note, run
from engine import LLM, SamplingParams
from engine.llm import MAX_SEQUENCES, Completion, Timing
from engine.profiling import (
    COMMUNICATES,
    DEVICE,
    Event,
    GpuTime,
    Span,
    annotate,
    difference,
    gpu_time,
    intersection,
    length,
    profiled,
    read_trace,
    span_of,
    union,
)
from errors import UserError
from options import ModelOptions, add_options, dtype_name, rank_options
from scripts.lib.markdown import table_lines
from tp import World, init_world

COLLECTIVE = r"^gloo:"
STEP = re.compile(r"prefill|decode \d+")
MODULE = re.compile(r"layer \d+ (attention|mlp)\b")  # not the span of a whole block, which includes waits
SHOWN_KERNELS = 20
OVERLAP_PID = 1 << 30  # a process id that does not occur in traces


# --- reading a trace -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """The four parts of one step's time, in ms. They add up to the whole step."""

    compute: float  # with no communication in flight
    hidden: float  # computing and communicating at the same time
    exposed: float  # communicating while nothing computes
    idle: float  # neither: the host's own time, launches, gaps

    @property
    def step(self) -> float:
        return self.compute + self.hidden + self.exposed + self.idle


@dataclass(frozen=True)
class Timeline:
    """One rank's activity: disjoint, ordered spans (µs), and its steps by name."""

    computing: list[Span]
    communicating: list[Span]
    steps: list[tuple[str, Span]]

    @property
    def hidden(self) -> list[Span]:
        return intersection(self.communicating, self.computing)

    @property
    def exposed(self) -> list[Span]:
        return difference(self.communicating, self.computing)


def timeline(events: list[Event], kernel: str = COMMUNICATES) -> Timeline:
    """Classify a trace's events as computing or communicating.

    In a trace with GPU kernels, those whose names match the regular expression `kernel` communicate and the others compute. The
    time of an NCCL kernel includes its wait for other ranks. In a trace without GPU kernels, gloo's collectives communicate;
    torch's operators and the modules on the thread that runs the model compute. Raises UserError if nothing computes.
    """
    events = [e for e in events if e.get("ph") == "X" and e.get("pid") != OVERLAP_PID]
    device = [e for e in events if e.get("cat") in DEVICE]
    marks = [e for e in events if e.get("cat") != "gpu_user_annotation" and STEP.fullmatch(e["name"])]
    if device:
        talks = re.compile(kernel, re.IGNORECASE)
        communicating = [e for e in device if talks.search(e["name"])]
        computing = [e for e in device if not talks.search(e["name"])]
    else:
        communicating = [e for e in events if re.search(COLLECTIVE, e["name"])]
        computing = [e for e in events if e["name"].startswith("aten::") or MODULE.match(e["name"])]
        thread = next((e["tid"] for e in marks or computing if not e["name"].startswith("aten::")), None)
        computing = [e for e in computing if thread is None or e["tid"] == thread]
    if not computing:
        raise UserError("the trace holds neither GPU kernels nor torch operators; record it with make trace")
    spans = [union([span_of(e) for e in chosen]) for chosen in (computing, communicating)]
    steps = [(e["name"], span_of(e)) for e in sorted(marks, key=lambda e: e["ts"])]
    whole = [edge for part in spans for span in part for edge in span]
    return Timeline(spans[0], spans[1], steps or [("whole trace", (min(whole), max(whole)))])


def split(line: Timeline, window: Span) -> Split:
    """The parts of one step's time."""

    def inside(spans: list[Span]) -> float:
        return length(intersection(spans, [window])) / 1e3

    hidden, exposed = inside(line.hidden), inside(line.exposed)
    compute = inside(line.computing) - hidden
    return Split(compute, hidden, exposed, (window[1] - window[0]) / 1e3 - compute - hidden - exposed)


def phase_of(step: str) -> str:
    """`prefill`, `decode`, or the name of a window that is no step."""
    return step.split(" ")[0] if STEP.fullmatch(step) else step


def by_phase(line: Timeline) -> dict[str, Split]:
    """The split of the prefill, and the mean split of the decode steps."""
    phases: dict[str, list[Split]] = {}
    for name, window in line.steps:
        phases.setdefault(phase_of(name), []).append(split(line, window))
    return {
        name: Split(**{part: fmean(asdict(one)[part] for one in found) for part in asdict(found[0])})
        for name, found in phases.items()
    }


def table(phases: dict[str, Split]) -> str:
    head = ["ms", "step", "compute", "hidden communication", "exposed communication", "idle", "hidden share"]
    lines: list[list[str]] = []
    for name, one in phases.items():
        total = one.hidden + one.exposed
        share = f"{one.hidden / total:.0%}" if total else "none sent"
        parts = (f"{ms:.3f}" for ms in (one.step, one.compute, one.hidden, one.exposed, one.idle))
        lines.append([name, *parts, share])
    return "\n".join(table_lines(head, lines))


def gpu_times(events: Sequence[Event], line: Timeline) -> dict[str, GpuTime]:
    """What the GPU does in the prefill and in a mean decode step. Empty for a trace without GPU kernels."""
    phases: dict[str, list[Span]] = {}
    for name, window in line.steps:
        phases.setdefault(phase_of(name), []).append(window)
    found = {name: gpu_time(events, windows) for name, windows in phases.items()}
    return {name: time for name, time in found.items() if time is not None}


def kind_table(phases: dict[str, GpuTime]) -> str:
    head = ["ms and share of a step", "step", *next(iter(phases.values())).by_kind]
    lines = [
        [name, f"{time.step_us / 1e3:.3f}", *(f"{us / 1e3:.3f} ({us / time.step_us:.0%})" for us in time.by_kind.values())]
        for name, time in phases.items()
    ]
    return "\n".join(table_lines(head, lines))


def kernel_table(phase: str, time: GpuTime) -> str:
    head = [f"kernel of the {phase}", "kind", "launches a step", "µs each, median", "µs a step"]
    lines = [
        [f"`{k.name.replace('|', ' ')[:70]}`", k.kind, f"{k.launches:.1f}", f"{k.span_us:.2f}", f"{k.own_us:.1f}"]
        for k in time.kernels[:SHOWN_KERNELS]
    ]
    return "\n".join(table_lines(head, lines))


def gpu_record(time: GpuTime) -> dict[str, Any]:
    """As it is written to the row of a sweep: µs of a step, with the kernels that the table shows."""
    kernels = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(k).items()}
        for k in time.kernels[:SHOWN_KERNELS]
    ]
    by_kind = {kind: round(us, 3) for kind, us in time.by_kind.items()}
    return {"step_us": round(time.step_us, 3), "by_kind_us": by_kind, "kernels": kernels}


def marked(events: list[Event], line: Timeline) -> list[Event]:
    """The events, with an additional process `overlap` at the top that shows hidden and exposed communication."""
    kept = [e for e in events if e.get("pid") != OVERLAP_PID]
    names = {0: "exposed communication", 1: "hidden communication", 2: "steps"}
    about = [("process_name", 0, {"name": "overlap"}), ("process_sort_index", 0, {"sort_index": -1})]
    about += [("thread_name", tid, {"name": name}) for tid, name in names.items()]
    extra = [{"ph": "M", "name": name, "pid": OVERLAP_PID, "tid": tid, "args": args} for name, tid, args in about]
    lanes = [(0, "exposed", line.exposed), (1, "hidden", line.hidden)]
    shown = [(tid, name, span) for tid, name, spans in lanes for span in spans]
    shown += [(2, name, span) for name, span in line.steps]
    return kept + extra + [
        {"ph": "X", "name": name, "cat": "overlap", "pid": OVERLAP_PID, "tid": tid, "ts": a, "dur": b - a}
        for tid, name, (a, b) in shown
    ]  # fmt: skip


# --- recording a trace ---------------------------------------------------------------------------------------------------


def benchmark_params(new_tokens: int) -> SamplingParams:
    """Greedy, with exactly so many tokens."""
    return SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)


def first_steps(lengths: Sequence[int], step_tokens: int) -> list[int]:
    """The number of the step, from 0 on, that draws the first token of each prompt. lengths: of the prompts. A step computes a token of
    each sequence that has begun, and then as much of the prompts, in their order, as fits into `step_tokens` tokens."""
    found: list[int] = []
    step, left = 0, step_tokens
    for rest in lengths:
        while rest > left:
            rest -= left
            # at least 1: with more sequences than fit, it only has to end
            step, left = step + 1, max(1, step_tokens - len(found))
        left -= rest
        found.append(step)
    return found


def generate_together(llm: LLM, prompts: list[list[int]], new_tokens: int, timing: Timing | None = None) -> Iterator[None]:
    """Generate greedily so that all sequences decode in the same steps. Yields after the prefill, which lasts until each has its first
    token, and after each of the `new_tokens - 1` decode steps, which compute one token of each sequence and nothing else. Sequences
    that begin before the last one get as many tokens more. llm: without limits and drafts. timing: filled in place.

    Collective. Raises UserError if the sequences cannot run at once."""
    first = first_steps([len(prompt) for prompt in prompts], llm.step_tokens(prompts))
    early = [first[-1] - step for step in first]
    answers = [Completion(prompt) for prompt in prompts]
    params = [benchmark_params(new_tokens + more) for more in early]
    with closing(llm.stream(prompts, params, timing=timing, answers=answers)) as steps:
        while not all(answer.token_ids for answer in answers):
            next(steps)
        if [len(answer.token_ids) - 1 for answer in answers] != early:
            raise UserError(
                f"{len(prompts)} sequences of {max(map(len, prompts))} tokens do not run at once: an engine runs up to {MAX_SEQUENCES}, "
                "whose keys and values fit into its memory; take a smaller batch"
            )
        yield
        for _ in steps:
            yield


def record(llm: LLM, prompts: list[list[int]], new_tokens: int, path: Path, world: World) -> None:
    """Profile one call of `generate_together` with named steps and write rank 0's trace to `path`. Collective."""
    with profiled(path, world.rank):
        steps = generate_together(llm, prompts, new_tokens)
        for i in range(new_tokens):
            with record_function(f"decode {i}" if i else "prefill"):
                next(steps)
    ended = next(steps, "ended")
    assert ended == "ended", f"more than {new_tokens - 1} decode steps"


def random_prompts(batch: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(tokens)] for _ in range(batch)]


def record_model(args: argparse.Namespace) -> bool:
    """Profile the model of the command line. Returns whether this is rank 0. Collective."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    world = init_world(**rank_options(args))
    config = model_config(args.model, args.variant, world.world_size, args.quantize)
    dtype = DTYPES[dtype_name(args.dtype, world.device.type)]
    model = load_model(args.model, config, world, dtype)
    if args.compile:
        model.compile_modules()
    prompts = random_prompts(args.batch_size, args.prompt_length, config.vocab_size, args.seed)
    llm = LLM(model, world=world, kv_dtype=args.kv_dtype)
    note(f"profiling {args.model}, {config.description}, {world.world_size} rank(s) with {world.comm.name}")
    for _ in generate_together(llm, prompts, args.new_tokens):
        pass
    annotate(model)
    record(llm, prompts, args.new_tokens, args.out, world)
    return world.rank == 0


def main() -> None:
    parser = Parser(description=__doc__)
    add_options(parser, ModelOptions, "the model", without=("tp", "max_model_len"), optional=("model",))
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="analyse this trace (.json or .json.gz) instead of recording one"
    )
    parser.add_argument(
        "--kernels", default=COMMUNICATES, metavar="REGEX", help="names of GPU kernels that communicate (default: %(default)s)"
    )
    parser.add_argument("--prompt-length", type=int, default=128, help="random prompt tokens (default: 128)")
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=8,
        help="tokens to profile: a prefill and this many decode steps less one (default: 8)",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the prompts (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out/trace.json"), help="trace to write (default: out/trace.json)")
    args = parser.parse_args()
    if (args.read is None) == (args.model is None):
        raise UserError("give --model to record a trace, or --read to analyse one")
    if min(args.prompt_length, args.new_tokens, args.batch_size) < 1:
        raise UserError("--prompt-length, --new-tokens and --batch-size must be at least 1")
    fetch_named(args, model="model")
    if args.read is None and not record_model(args):
        return
    path = args.read or args.out
    trace = read_trace(path)
    line = timeline(trace["traceEvents"], args.kernels)
    print(table(by_phase(line)))
    if times := gpu_times(trace["traceEvents"], line):
        print("\n" + "\n\n".join([kind_table(times), *(kernel_table(name, time) for name, time in times.items())]))
    if args.read is None:
        path.write_text(json.dumps(trace | {"traceEvents": marked(trace["traceEvents"], line)}))
        note(f"wrote {path}; open it at ui.perfetto.dev: the process `overlap` marks what is hidden and what is exposed")


if __name__ == "__main__":
    run(main)

"""The ranks of a sweep. `python -m scripts.sweep` starts them and reads the results that rank 0 prints to stdout.

Configurations that differ only in their variant form a group. If all models of a group fit in memory at once, the variants
alternate run by run, so that a slowdown of the machine affects all of them equally. Otherwise each model does all its runs
before the next model is loaded.

Each result line is `@sweep ` and a JSON object: {"begin": setting}, {"done": setting, …}, or {"failed": setting, "error": text}.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoints.hub import fetched
from checkpoints.memory import SHORT, free_bytes, weight_bytes
from checkpoints.presets import model_config
from checkpoints.weights import DTYPES, load_model
from cli import run
from comms import Communicator, PendingAllReduce, SimulatedLink, parse_link
from comms.registry import choose
from comms.simulated import sent_bytes
from engine import LLM
from engine.llm import MAX_SEQUENCES, Timing
from engine.profiling import read_trace
from engine.tuning import tune
from errors import UserError
from generate import measure
from options import TUNE_SECONDS
from scripts.sweep.rows import Setting, interconnect
from scripts.trace import by_phase, generate_together, gpu_record, gpu_times, random_prompts, record, timeline
from tp import World, agree_on_error, init_world

MARK = "@sweep "
MEMORY_SHARE = 0.6  # of free memory may hold the weights of a group; KV caches and activations need the rest
PROFILED_TOKENS = 9  # a prefill and 8 decode steps

Turn = tuple[int, Setting]  # the run's number (0 is the warm-up run) and its setting


class MeteredLink(SimulatedLink):
    """A simulated link that also adds up the link time of its all-reduces in seconds, hidden or exposed."""

    link_seconds = 0.0

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        self.link_seconds += self.link.latency + sent_bytes(self.inner, partial) / self.link.bandwidth
        return super().begin_all_reduce(partial, overlap)


def say(world: World, **content: Any) -> None:
    if world.rank == 0:
        print(MARK + json.dumps(content), flush=True)


def turns(group: list[Setting], together: bool) -> Iterator[Turn]:
    """Every run of a group in order. Variants alternate run by run if `together`.

    Run 0 warms up, the next `runs` are measured, and the last one is profiled if the setting says so.
    """
    rounds = range(1 + group[0].runs + group[0].profile)
    if together:
        return ((number, setting) for number in rounds for setting in group)
    return ((number, setting) for setting in group for number in rounds)


class Models:
    """The loaded models. Each model has its own communicator, so that the communicator's counters count that model only."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loaded: dict[str, tuple[LLM, Communicator]] = {}

    @staticmethod
    def key(s: Setting) -> str:
        return json.dumps(
            [s.model, s.variant, s.comm, s.interconnect, s.dtype, s.compile, s.seed, s.overlap, s.kv_dtype, s.quantize]
        )

    def keep(self, settings: Iterable[Setting]) -> None:
        """Free all models except those of `settings`."""
        kept = {self.key(s) for s in settings}
        self.loaded = {key: found for key, found in self.loaded.items() if key in kept}
        gc.collect()
        torch.cuda.empty_cache()

    def get(self, s: Setting) -> tuple[LLM, Communicator]:
        """The model of a setting and its communicator; loads them if necessary. Collective. Raises UserError."""
        if self.key(s) not in self.loaded:
            comm = self._communicator(s)
            world = replace(self.world, comm=comm, overlap=s.overlap)
            config = model_config(name := fetched(s.model), s.variant, s.tp, s.quantize)
            tokens = s.batch * (s.prompt_length + s.new_tokens)
            model = load_model(name, config, world, DTYPES[s.dtype], s.seed, tokens, s.kv_dtype)
            tune(model, self.world, MAX_SEQUENCES, TUNE_SECONDS)  # as a server does; LLM only reads what was measured
            if s.compile:
                model.compile_modules()
            self.loaded[self.key(s)] = LLM(model, world=world, kv_dtype=s.kv_dtype), comm
        return self.loaded[self.key(s)]

    def about(self, s: Setting) -> dict[str, str]:
        """The variant, the communicator and the schedules of a ladder's all-reduces, in words."""
        llm, comm = self.loaded[self.key(s)]
        schedules = llm.engine.runner.schedules if llm.engine else None
        chosen = str(schedules) if schedules and len(schedules.possible) > 1 else ""
        return {"variant": llm.model.config.description, "communicator": comm.name, "schedules": chosen}

    def _communicator(self, s: Setting) -> Communicator:
        link = interconnect(s.interconnect).link
        choose(s.device, s.comm, link)  # refuses a link on a GPU
        if self.world.world_size == 1:
            return self.world.comm
        inner = choose(s.device, s.comm).build()
        return MeteredLink(inner, parse_link(link)) if link else inner

    def fit_together(self, group: list[Setting]) -> bool:
        """Whether the weights of all models of the group fit into `MEMORY_SHARE` of free memory on every rank. Collective."""
        self.keep(group)
        need = 0
        for s in group:
            if self.key(s) not in self.loaded:
                with suppress(UserError):  # `get` raises it again in this setting's run
                    need += weight_bytes(model_config(fetched(s.model), s.variant, s.tp, s.quantize), s.tp, DTYPES[s.dtype])
        fits = torch.tensor(int(need < MEMORY_SHARE * free_bytes(self.world.device)), device=self.world.device)
        if self.world.world_size > 1:
            dist.all_reduce(fits, dist.ReduceOp.MIN)
        return bool(fits.item())


# --- one run -------------------------------------------------------------------------------------------------------------


def one_run(llm: LLM, comm: Communicator, s: Setting, world: World) -> dict[str, Any]:
    """One sample: prefill and decode as generate.py measures them, the time of every step, and the all-reduce time per decode step.
    All sequences decode in each of these steps (see `generate_together`). `step_tokens`: the most tokens of a step of the prefill.

    `exposed_ms`: how long rank 0's host waited for all-reduces (None if the wait happens on the device, where the host cannot
    measure it). `link_ms`: how long the simulated link needed for them. Both are means per decode step.
    """
    model = llm.model
    prompts = random_prompts(s.batch, s.prompt_length, model.config.vocab_size, s.seed)
    cuda, before = world.device.type == "cuda", 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
        before = torch.cuda.memory_allocated(world.device)
    timing, counters = Timing(), list[tuple[float, float]]()
    with at_once(world):
        for _ in generate_together(llm, prompts, s.new_tokens, timing):
            counters.append((comm.waited or 0.0, getattr(comm, "link_seconds", 0.0)))
    speed = measure(model, timing, world)
    if cuda:  # count this model only: other models of the group may be in memory
        own = sum(p.numel() * p.element_size() for p in model.parameters())
        speed["peak_memory_gb"] = round((own + torch.cuda.max_memory_allocated(world.device) - before) / 1e9, 3)
    steps = max(1, len(timing.steps))
    (waited_before, link_before), (waited, link) = counters[0], counters[-1]
    return {
        **speed,
        "step_tokens": llm.step_tokens(prompts),
        "step_ms": [round(seconds * 1e3, 4) for seconds in timing.steps],
        "exposed_ms": None if comm.waited is None else round((waited - waited_before) / steps * 1e3, 4),
        "link_ms": round((link - link_before) / steps * 1e3, 4) if isinstance(comm, MeteredLink) else None,
    }


@contextmanager
def at_once(world: World) -> Iterator[None]:
    """Let all ranks begin at once, and no rank collect garbage meanwhile: a late rank delays the others in the first all-reduce, and
    Python's collector goes through all imported objects. Servers freeze what they imported."""
    gc.collect()
    gc.disable()
    if world.world_size > 1:
        dist.barrier(group=world.control)
    try:
        yield
    finally:
        gc.enable()


def profiled_split(llm: LLM, s: Setting, world: World) -> dict[str, Any] | None:
    """The split of the mean decode step in rank 0's trace, in ms, and on a GPU what its kernels do in the prefill and in a decode step.
    None on other ranks, and without decode steps."""
    prompts = random_prompts(s.batch, s.prompt_length, llm.model.config.vocab_size, s.seed)
    tokens = min(s.new_tokens, PROFILED_TOKENS)
    for _ in generate_together(llm, prompts, tokens):  # an engine of its own, which captures graphs
        pass
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record(llm, prompts, tokens, path, world)
        if world.rank or s.new_tokens == 1:
            return None
        events = read_trace(path)["traceEvents"]
        line = timeline(events)
        gpu = {phase: gpu_record(time) for phase, time in gpu_times(events, line).items()}
        return asdict(by_phase(line)["decode"]) | {"source": "profiler"} | ({"gpu": gpu} if gpu else {})


# --- a group -------------------------------------------------------------------------------------------------------------


class Shortage(Exception):
    """Memory ran out while several models of a group were loaded."""


def attempt(models: Models, turn: Turn, together: bool) -> tuple[Any, str | None]:
    """Do one run. Returns its sample (of the profiled run: the split) and None, or None and the error that all ranks agree on.

    Collective. Raises Shortage if memory runs out and `together`.
    """
    number, s = turn
    result, error = None, None
    try:
        llm, comm = models.get(s)
        if number > s.runs:
            result = profiled_split(llm, s, models.world)
        else:
            result = one_run(llm, comm, s, models.world)
    except UserError as e:
        error = str(e)
        if SHORT in error and together:
            error = "memory"
    except (torch.OutOfMemoryError, MemoryError) as e:
        error = "memory" if together else f"out of memory: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
    try:
        agree_on_error(models.world, UserError(error) if error else None)
    except UserError as e:
        if str(e) == "memory":
            raise Shortage from None
        return None, str(e)
    return result, None


def run_group(models: Models, group: list[Setting], together: bool) -> None:
    """Measure a group and print the results. Collective. Raises Shortage."""
    world = models.world
    samples: dict[Setting, list[dict[str, Any]]] = {s: [] for s in group}
    splits: dict[Setting, dict[str, Any] | None] = dict.fromkeys(group)
    failed: set[Setting] = set()
    for number, s in turns(group, together):
        if s in failed:
            continue
        if not together:
            models.keep([s])
        say(world, begin=asdict(s))
        result, error = attempt(models, (number, s), together)
        if error is not None:
            failed.add(s)
            say(world, failed=asdict(s), error=error)
        elif number > s.runs:
            splits[s] = result
        elif number > 0:
            samples[s].append(result)
        if number == s.runs + s.profile and s not in failed:
            # no local variable here may refer to a model: it would stay in memory when the next one is loaded
            say(world, done=asdict(s), samples=samples[s], split=splits[s], **models.about(s))


def run_together_or_in_turn(models: Models, group: list[Setting]) -> None:
    """Measure a group with all its models in memory if they fit, otherwise one model at a time. Collective."""
    short = False
    if len(group) > 1 and models.fit_together(group):
        try:
            run_group(models, group, together=True)
            return
        except Shortage:
            short = True
    if short:  # outside the except block: inside it, the exception's frames still refer to the models that must be freed
        models.keep([])
    run_group(models, group, together=False)


def read_settings(arguments: list[str]) -> list[Setting]:
    """The settings in the file that `python -m scripts.sweep` wrote. Raises UserError."""
    try:
        (path,) = arguments
        settings = [Setting(**raw) for raw in json.loads(Path(path).read_text())]
    except (OSError, ValueError, TypeError) as e:
        raise UserError(
            f"python -m scripts.sweep starts this with a file of settings, not with {arguments} ({e}); start that"
        ) from e
    if not settings:
        raise UserError(f"{path} has no settings; start python -m scripts.sweep")
    return settings


def separate_hosts(hosts: int) -> None:
    """Make NCCL treat equal shares of the ranks as so many hosts: between them it then uses neither NVLink nor shared memory, but
    sockets over loopback, or InfiniBand if the machine has it. Must be called before NCCL starts."""
    if hosts > 1:
        os.environ["NCCL_HOSTID"] = f"host-{int(os.environ['RANK']) * hosts // int(os.environ['WORLD_SIZE'])}"


def main() -> None:
    settings = read_settings(sys.argv[1:])
    separate_hosts(interconnect(settings[0].interconnect).hosts)
    world = init_world(settings[0].device, deterministic=settings[0].deterministic)
    models = Models(world)
    for _, found in groupby(settings, key=lambda s: s.of_variant("")):
        run_together_or_in_turn(models, list(found))


if __name__ == "__main__":
    run(main)

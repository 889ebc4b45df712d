"""The ranks of a sweep: `scripts/sweep.py` starts them and reads what rank 0 says on stdout.

Configurations that differ in their variant alone are one group. If their models fit in memory together, the variants take
turns, run by run, so that a machine that slows down slows all of them; if not, each model's runs follow one another.

Every line is `@sweep ` and a JSON object: {"begin": setting}, {"done": setting, …}, or {"failed": setting, "error": text}.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import DTYPES, load_model, model_config
from cli import run
from comm import Communicator, Handle, SimulatedLink, choose, parse_link
from comm.simulated import sent_bytes
from engine.offline import Timing, generate
from engine.sampler import SamplingParams
from errors import UserError
from generate import measure
from memory import SHORT, free_bytes, weight_bytes
from model import Transformer
from scripts.sweep_rows import Setting, interconnect
from scripts.trace import by_phase, random_prompts, read_trace, record, timeline
from tp import World, agree_on_error, init_world

MARK = "@sweep "
MEMORY_SHARE = 0.6  # of what is free may go to the weights of one group; caches and activations need the rest
PROFILED_TOKENS = 9  # a prefill and 8 decode steps

Turn = tuple[int, Setting]  # the run's number, 0 being the one that warms up


class MeteredLink(SimulatedLink):
    """A simulated link that also adds up how long its sums take, hidden or not."""

    link_seconds = 0.0

    def start(self, partial: Tensor) -> Handle:
        self.link_seconds += self.link.latency + sent_bytes(self.inner, partial) / self.link.bandwidth
        return super().start(partial)


def say(world: World, **content: Any) -> None:
    if world.rank == 0:
        print(MARK + json.dumps(content), flush=True)


def turns(group: list[Setting], together: bool) -> Iterator[Turn]:
    """Every run of a group, the variants in turn if their models are in memory together. The run behind the measured ones is
    the profiled one."""
    rounds = range(1 + group[0].runs + group[0].profile)
    if together:
        return ((number, setting) for number in rounds for setting in group)
    return ((number, setting) for setting in group for number in rounds)


class Models:
    """The loaded models; a communicator belongs to its model, so that its counters do too."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loaded: dict[str, tuple[Transformer, Communicator]] = {}

    @staticmethod
    def key(s: Setting) -> str:
        return json.dumps([s.model, s.variant, s.comm, s.interconnect, s.dtype, s.compile, s.seed])

    def keep(self, settings: Iterable[Setting]) -> None:
        """Free all models but those of `settings`."""
        kept = {self.key(s) for s in settings}
        self.loaded = {key: found for key, found in self.loaded.items() if key in kept}
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def get(self, s: Setting) -> tuple[Transformer, Communicator]:
        """Collective. Raises UserError."""
        if self.key(s) not in self.loaded:
            comm = self._communicator(s)
            world = World(self.world.rank, self.world.world_size, self.world.device, comm, self.world.control)
            config = model_config(s.model, s.variant, s.tp)
            tokens = s.batch * (s.prompt_length + s.new_tokens)
            model = load_model(s.model, config, world, DTYPES[s.dtype], s.seed, tokens)
            if s.compile:
                model.compile_modules()
            self.loaded[self.key(s)] = model, comm
        return self.loaded[self.key(s)]

    def about(self, s: Setting) -> dict[str, str]:
        """The variant and the communicator in words."""
        model, comm = self.loaded[self.key(s)]
        return {"variant": model.config.description, "communicator": comm.name}

    def _communicator(self, s: Setting) -> Communicator:
        link = interconnect(s.interconnect).link
        choose(s.device, s.comm, link)  # refuses a link on a GPU
        if self.world.world_size == 1:
            return self.world.comm
        inner = choose(s.device, s.comm).build()
        return MeteredLink(inner, parse_link(link)) if link else inner

    def fit_together(self, group: list[Setting]) -> bool:
        """Whether the weights of all of them leave room for the rest, on every rank alike. Collective."""
        self.keep(group)
        need = 0
        for s in group:
            if self.key(s) not in self.loaded:
                with suppress(UserError):  # its turn will tell
                    need += weight_bytes(model_config(s.model, s.variant, s.tp), s.tp, DTYPES[s.dtype])
        fits = torch.tensor(int(need < MEMORY_SHARE * free_bytes(self.world.device)), device=self.world.device)
        if self.world.world_size > 1:
            dist.all_reduce(fits, dist.ReduceOp.MIN)
        return bool(fits.item())


# --- one run -------------------------------------------------------------------------------------------------------------


def one_run(model: Transformer, comm: Communicator, s: Setting, world: World) -> dict[str, Any]:
    """One sample: prefill and decode as generate.py measures them, every step, and what the sums cost a decode step.

    `exposed_ms` is what rank 0's host waited for sums (None where only the device knows), `link_ms` how long a simulated link
    needed for them.
    """
    prompts = random_prompts(s.batch, s.prompt_length, model.config.vocab_size, s.seed)
    greedy = [SamplingParams(temperature=0)] * s.batch
    cuda, before = world.device.type == "cuda", 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
        before = torch.cuda.memory_allocated(world.device)
    timing, counters = Timing(), [(0.0, 0.0)]
    for _ in generate(model, prompts, greedy, s.new_tokens, timing):
        counters.append((comm.waited or 0.0, getattr(comm, "link_seconds", 0.0)))
    speed = measure(model, timing, s.batch, world)
    if cuda:  # other models may be in memory, too
        own = sum(p.numel() * p.element_size() for p in model.parameters())
        speed["peak_memory_gb"] = round((own + torch.cuda.max_memory_allocated(world.device) - before) / 1e9, 3)
    steps = max(1, len(timing.steps))
    (waited_before, link_before), (waited, link) = counters[1], counters[-1]
    return {
        **speed,
        "step_ms": [round(seconds * 1e3, 4) for seconds in timing.steps],
        "exposed_ms": None if comm.waited is None else round((waited - waited_before) / steps * 1e3, 4),
        "link_ms": round((link - link_before) / steps * 1e3, 4) if isinstance(comm, MeteredLink) else None,
    }


def profiled_split(model: Transformer, s: Setting, world: World) -> dict[str, Any] | None:
    """The mean decode step of rank 0's trace."""
    prompts = random_prompts(s.batch, s.prompt_length, model.config.vocab_size, s.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record(model, prompts, min(s.new_tokens, PROFILED_TOKENS), path, world)
        if world.rank or s.new_tokens == 1:
            return None
        return asdict(by_phase(timeline(read_trace(path)["traceEvents"]))["decode"]) | {"source": "profiler"}


def link_split(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The mean decode step on a simulated link: what was waited for, and the rest of what the link took. The host's own time
    counts as computing."""
    if not samples or samples[0]["link_ms"] is None or not samples[0]["step_ms"]:
        return None
    step = fmean(fmean(s["step_ms"]) for s in samples)
    exposed = fmean(s["exposed_ms"] for s in samples)
    hidden = min(max(0.0, fmean(s["link_ms"] for s in samples) - exposed), step - exposed)
    return {"compute": step - exposed - hidden, "hidden": hidden, "exposed": exposed, "idle": 0.0, "source": "simulated link"}


# --- a group -------------------------------------------------------------------------------------------------------------


class Shortage(Exception):
    """Memory ran out while several models of a group were loaded."""


def attempt(models: Models, turn: Turn, together: bool) -> tuple[Any, str | None]:
    """One run's sample (or, behind the measured ones, the split), or the error that all ranks agree on. Raises Shortage."""
    number, s = turn
    result, error = None, None
    try:
        model, comm = models.get(s)
        if number > s.runs:
            result = profiled_split(model, s, models.world)
        else:
            result = one_run(model, comm, s, models.world)
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
    """Measure a group and say what came out. Raises Shortage."""
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
            # nothing here may name a model: it would stay in memory beside the next one
            split = link_split(samples[s]) or splits[s]
            say(world, done=asdict(s), samples=samples[s], split=split, **models.about(s))


def run_together_or_in_turn(models: Models, group: list[Setting]) -> None:
    """Measure a group, all its models in memory if they fit there."""
    short = False
    if len(group) > 1 and models.fit_together(group):
        try:
            run_group(models, group, together=True)
            return
        except Shortage:
            short = True
    if short:  # behind the handler: while it runs, the exception's frames hold the models that have to go
        models.keep([])
    run_group(models, group, together=False)


def read_settings(arguments: list[str]) -> list[Setting]:
    """Those of the file that scripts/sweep.py wrote. Raises UserError."""
    try:
        (path,) = arguments
        settings = [Setting(**raw) for raw in json.loads(Path(path).read_text())]
    except (OSError, ValueError, TypeError) as e:
        raise UserError(f"scripts/sweep.py starts this with a file of settings, not with {arguments} ({e}); start that") from e
    if not settings:
        raise UserError(f"{path} has no settings; start scripts/sweep.py")
    return settings


def main() -> None:
    settings = read_settings(sys.argv[1:])
    world = init_world(settings[0].device)
    models = Models(world)
    for _, found in groupby(settings, key=lambda s: s.twin("")):
        run_together_or_in_turn(models, list(found))


if __name__ == "__main__":
    run(main)

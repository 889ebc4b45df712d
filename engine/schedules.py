"""Chooses how a ladder's all-reduces are computed in steps of each size (`comms.interface.Schedule`).

An all-reduce that is hidden behind the next module takes SMs from it, and one that is not hidden can be fused with what follows.
Which is faster depends on the sizes of both, so the whole step is measured, with each schedule, on invented inputs. The times are
kept in a file, as those of all-reduces (`comms/table.py`). All ranks take the same choices, because the time of the slowest rank
counts.
"""

import gc
import hashlib
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from statistics import median
from typing import Any, NamedTuple, cast

import torch

from comms.interface import LEAST_COPIED, SCHEDULES, Communicator, Schedule
from comms.table import Table, load, machine_key, save
from engine.head_model import HeadModel
from kernels.dispatch import successive_seconds
from model import Transformer
from tp import World

# --- CUDA graphs of the engine's steps ---------------------------------------------------------------------------------------


class Captured(NamedTuple):
    """A captured step. output: the tensors that a replay writes."""

    replay: Callable[[], object]
    output: Any


class Graphs:
    """Replays functions without arguments as CUDA graphs, which share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._captured: dict[Hashable, Captured] = {}
        if device.type == "cuda":
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def replay(self, key: Hashable) -> Any:
        """Run the step that was kept under `key`. Returns the tensors that it writes."""
        replay, output = self._captured[key]
        replay()
        return output

    def keep(self, key: Hashable, captured: Captured) -> None:
        """Let `replay` find a captured step under `key`."""
        self._captured[key] = captured

    def capture(self, step: Callable[[], Any]) -> Captured:
        """Capture `step`. `torch.cuda.graph` would first collect garbage, which takes longer than the capture."""
        step()  # compiles kernels, opens connections
        torch.cuda.synchronize(self.device)
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # it might free another graph, which a capture does not allow
        try:
            with torch.cuda.stream(self._stream):
                # other threads, such as NCCL's watchdog, may call CUDA meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = step()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()  # a process that ends within a capture is aborted, and its error hard to find
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return Captured(graph.replay, output)


CODE = (  # files that decide how long a step takes
    "comms/*.py",
    "kernels/*.py",
    "quantized/weight.py",
    "engine/runner.py",
    "engine/schedules.py",
    "engine/step_inputs.py",
    "model.py",
)
LIMIT = 60.0  # seconds that an engine measures, about: later cases use the default until the next start
TURNS = 3  # of each schedule; the first one shows how many replays the others need, and lets the GPU lower its clock
SECONDS, MOST_REPLAYS = 0.01, 50  # of a schedule's turn, about, and at most
GAIN = 0.01  # by which another schedule must be faster than the default: smaller differences are noise

# seconds of each of so many calls in a row
Timer = Callable[[Callable[[], object], int], list[float]]


@dataclass
class Schedules:
    """The schedules of an engine's steps. A case is a kind of step and its rows: `decode 64`.

    possible: the first is the default; the others are tried, too, copy engines only where the all-reduce of all rows is long enough
    for them. row_bytes: of the all-reduce of a row. chosen: by case. spent: seconds that measuring took.
    """

    comm: Communicator
    world: World
    table: Table
    possible: tuple[Schedule, ...]
    row_bytes: int
    timer: Timer = successive_seconds
    chosen: dict[str, Schedule] = field(default_factory=dict)
    spent: float = 0.0

    @classmethod
    def of(cls, model: Transformer | HeadModel, world: World, kv_dtype: str = "auto") -> "Schedules":
        """For the steps of this model with such a KV cache. Collective. To be called before the KV cache takes the rest of the
        memory."""
        possible = SCHEDULES if world.overlap == "auto" else (cast(Schedule, world.overlap),)
        choose = world.overlap == "auto" and world.world_size > 1 and bool(model.config.ladder_layers)
        row_bytes = model.config.hidden_size * model.norm.weight.itemsize
        found = cls(model.comm, world, Table("overlap", {}), possible if choose else possible[:1], row_bytes)
        if choose and world.device.type == "cuda":
            found.table = load("overlap", table_key(model, world, kv_dtype), found._names, world.control)
        for schedule in found.possible[::-1]:  # opens buffers
            model.comm.use(schedule)
        return found

    def fastest(self, case: str, prepare: Callable[[], Captured], invent: Callable[[], None]) -> Captured:
        """prepare() with the fastest schedule for this case, which the communicator uses from now on. Measures all possible ones
        if it is not known yet, after invent(), which writes the inputs. Collective."""
        start = time.monotonic()
        prepared: dict[Schedule, Captured] = {}
        for schedule in self._candidates(case):
            self.comm.use(schedule)
            prepared[schedule] = prepare()
        if len(prepared) > 1:
            invent()
            self._measure(case, prepared)
            self.spent += self.world.largest([time.monotonic() - start])[0]
        self.use(case)
        return prepared[self.chosen[case]]

    def _measure(self, case: str, prepared: dict[Schedule, Captured]) -> None:
        """Store the times of the slowest rank. The schedules take turns, because the clock of the GPU drifts."""
        replays, samples = 1, {schedule: list[float]() for schedule in prepared}
        for turn in range(TURNS):
            for schedule, captured in prepared.items():
                self.comm.use(schedule)  # of a step without a graph
                samples[schedule] += self.timer(captured.replay, replays)
            if turn == 0:
                fastest = min(self.world.largest([median(times) for times in samples.values()]))
                replays = max(1, min(MOST_REPLAYS, ceil(SECONDS / fastest)))
                samples = {schedule: [] for schedule in prepared}
        seconds = self.world.largest([median(times) for times in samples.values()])
        self.table.times[case] = {name: 1e6 * one for name, one in zip(prepared, seconds, strict=True)}
        if self.world.device.type == "cuda":
            save(self.table, self._names, self.world.control)

    def is_open(self, case: str) -> bool:
        """Whether the fastest schedule for this case has to be measured."""
        return len(self._candidates(case)) > 1

    def use(self, case: str) -> None:
        """Let the communicator use the schedule for this case, or the default if it is open."""
        self.chosen[case] = self._candidates(case)[0]
        self.comm.use(self.chosen[case])

    def _candidates(self, case: str) -> tuple[Schedule, ...]:
        """The schedule to use for this case, or several from which a measurement has to choose."""
        if len(self.possible) == 1 or case in self.chosen:
            return (self.chosen.get(case, self.possible[0]),)
        if case in self.table.times:
            times, default = self.table.times[case], self.possible[0]
            found = min(self._tried(case), key=lambda schedule: times[schedule])
            return (found if times[found] < (1 - GAIN) * times[default] else default,)
        return self._tried(case) if self.spent < LIMIT else self.possible[:1]

    def _tried(self, case: str) -> tuple[Schedule, ...]:
        """The possible schedules that differ for this case."""
        copied = int(case.split()[1]) * self.row_bytes >= LEAST_COPIED
        return tuple(one for one in self.possible if copied or one != "copy-engines" or len(self.possible) == 1)

    def _names(self, case: str) -> set[str]:
        """The schedules in the table for this case."""
        return set(self._tried(case))

    def __str__(self) -> str:
        """The choices: `decode 1 to 64 overlapped, decode 96 deferred`."""
        cases = sorted((kind, int(rows)) for kind, rows in map(str.split, self.chosen))
        parts = []
        for (kind, schedule), group in groupby(cases, key=lambda case: (case[0], self.chosen[f"{case[0]} {case[1]}"])):
            rows = [rows for _, rows in group]
            parts.append(f"{kind} {rows[0]}{f' to {rows[-1]}' if len(rows) > 1 else ''} {schedule}")
        return ", ".join(parts)


def table_key(model: Transformer | HeadModel, world: World, kv_dtype: str) -> dict[str, str]:
    """What the times of a model's steps depend on: the machine, the links between the ranks, and the model. Collective, on GPUs."""
    from comms.workspace import links  # imports Triton, which a machine without a GPU need not have

    adapted = " adapters" if getattr(model, "step_adapters", None) else ""  # which changes what is fused
    shape = f"{model.config!r} {model.comm.name} {kv_dtype}{adapted}"
    key = machine_key(world.device, world.world_size, model.norm.weight.dtype, CODE)
    key["links"] = links(world.device)
    key["model"] = hashlib.sha256(shape.encode()).hexdigest()[:16]
    return key

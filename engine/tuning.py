"""Finds the fastest kernel configs for this model's linear layers of few rows, measured once on this machine and kept in a file.

Quantized layers, and shapes in 16 bits that no table of this GPU has, are measured when a server starts for the first time, within
a time limit. The ranks share the work. The file is in $RUNG_CACHE, else in ~/.cache/rung; another GPU, driver, library or kernel
needs another file.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from checkpoints.eagle import EagleHead
from comms.table import PLAUSIBLE, Table, Times, from_rank_0, machine_key, read, write
from kernels.linear_config import MAX_ROWS, PROMPT_ROWS, Config, Shape, format_config, shipped_now, use
from kernels.linear_quantized import Packed, has_scaled_product
from kernels.linear_tuning import (
    ROWS,
    Problem,
    QuantizedProblem,
    QuantizedShape,
    compile_kernels,
    measure,
    quantized_problem_of,
    quantized_row_counts,
    row_counts,
    winner,
)
from layers.linear import ShardedLinear
from model import Transformer
from tp import World

CODE = ("kernels/linear*.py", "kernels/dispatch.py")
FAILED = PLAUSIBLE[1]  # µs in the table, of a config that cannot run
COMPILING_SHARE = 0.5  # of the time limit; the rest is for measuring
MAX_THREADS = 16  # of a rank that compile kernels; the ranks of a host share its cores


@dataclass(frozen=True)
class Tuning:
    """What `tune` did, on all ranks."""

    missing: int  # shapes and numbers of rows that had not been measured on such a GPU
    found: Times  # µs of those that were measured now, by `table_key` and config
    messages: list[str]  # configs that failed, and a file that cannot be written
    seconds: float


def layers(model: Transformer | EagleHead) -> list[ShardedLinear]:
    """This rank's linear layers, without an embedding that is no output layer."""
    lookup = model.embedding if isinstance(model, Transformer) and model.head is not model.embedding else None
    return [
        module
        for module in model.modules()
        if isinstance(module, ShardedLinear) and module is not lookup and not module.is_mixed
    ]


def shapes(model: Transformer | EagleHead) -> dict[Shape, list[Tensor]]:
    """This rank's linear layers: the weights of each shape."""
    found: dict[Shape, list[Tensor]] = {}
    if isinstance(model, EagleHead):
        found[Shape(*model.fc.shape)] = [model.fc]
    for module in layers(model):
        if not module.is_quantized:
            gated = module.fused_gate
            found.setdefault(Shape(len(module.weight), module.weight.shape[1], gated), []).append(module.weight)
    return found


def quantized_shapes(model: Transformer | EagleHead) -> dict[QuantizedShape, list[Packed]]:
    """This rank's quantized layers that this GPU's kernels compute."""
    found: dict[QuantizedShape, list[Packed]] = {}
    for module in layers(model):
        for part in module.quantized or ():
            if (packed := getattr(part, "packed", None)) is not None:
                gated = module.fused_gate and module.packed is packed
                scaled = has_scaled_product(packed, model.norm.weight.dtype)
                shape = QuantizedShape(packed.n, packed.k, gated, format=packed.format, scaled=scaled)
                found.setdefault(shape, []).append(packed)
    return found


def problems(model: Transformer | EagleHead, rows: int) -> list[Problem]:
    """What is measured of this rank's layers, if decoding computes at most `rows` rows."""
    plain = [Problem(n, shape, weights) for shape, weights in shapes(model).items() for n in row_counts(shape, rows)]
    dtype = model.norm.weight.dtype
    quantized = [
        QuantizedProblem(n, shape, weights, dtype)
        for shape, weights in quantized_shapes(model).items()
        for n in quantized_row_counts(shape, rows)
    ]
    return [*plain, *{problem.key: problem for problem in quantized if problem.is_used and problem.candidates()}.values()]


def supported(model: Transformer, world: World) -> bool:
    """Whether there are kernels to choose from."""
    return world.device.type == "cuda" and model.norm.weight.dtype.itemsize == 2


@torch.inference_mode()
def tune(
    model: Transformer,
    world: World,
    rows: int,
    seconds: float,
    quiet: bool = True,
    rebuild: bool = False,
    draft: Transformer | EagleHead | None = None,
) -> Tuning:
    """Use the fastest known configs, and measure the unknown ones for at most about `seconds`. Collective.

    rows: most rows of a layer that decoding computes. seconds 0: only read the file. rebuild: measure all shapes again, those of
    the shipped tables, too. draft: what drafts for the model.
    """
    start = time.monotonic()
    if not supported(model, world):
        return Tuning(0, {}, [], 0.0)
    table = Table("linear", machine_key(world.device, 1, model.norm.weight.dtype, CODE))
    if world.rank == 0 and not rebuild:
        table = read(table, names_of)
    table = Table(**from_rank_0(vars(table), world.control)) if world.world_size > 1 else table
    known = set() if rebuild else {*shipped_now(table.key["gpu"]), *table.times}
    wanted = {problem.key: problem for problem in problems(model, rows)}
    if draft is not None:
        wanted = {problem.key: problem for problem in problems(draft, rows)} | wanted
    missing = [problem for key, problem in wanted.items() if key not in known]
    threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // world.world_size))
    mine = missing[world.rank :: world.world_size]
    found, messages = _measured(mine, seconds, threads, quiet) if seconds else ({}, [])
    if world.world_size > 1 and seconds:
        everyones: list[tuple[Times, list[str]]] = [({}, [])] * world.world_size
        dist.all_gather_object(everyones, (found, messages), group=world.control)
        found = {case: times for part, _ in everyones for case, times in part.items()}
        messages = [message for _, part in everyones for message in part]
    table.times.update(found)
    if found and world.rank == 0:
        _keep(table, messages)
    use({case: best(case, times) for case, times in table.times.items()})
    return Tuning(len(missing), found, messages, time.monotonic() - start)


def _measured(problems: Sequence[Problem], seconds: float, threads: int, quiet: bool) -> tuple[Times, list[str]]:
    start = time.monotonic()
    compile_kernels(problems, threads, start + COMPILING_SHARE * seconds)
    found: Times = {}
    messages: list[str] = []
    for problem in tqdm(problems, desc="fastest kernels", disable=quiet):
        if time.monotonic() > start + seconds:
            break
        times, failed = measure(problem)
        names = dict.fromkeys(names_of(problem.key), FAILED)
        found[problem.key] = names | {name_of(config): 1e6 * time for config, time in times.items()}
        messages += failed
    return found, messages


def _keep(table: Table, messages: list[str]) -> None:
    try:
        write(table, names_of)
    except OSError as error:
        messages.append(f"{table.path} cannot be written, so each start measures again: {error}")


# --- a table's names ------------------------------------------------------------------------------------------------------


def names_of(case: str) -> set[str]:
    """The configs that are measured for a `table_key` (`kernels/linear_config.py`), and cuBLAS. Raises ValueError if there is no
    such key."""
    return set(_configs(case))


def problem_of(case: str) -> Problem:
    """A `table_key`'s problem, without weights. Raises ValueError if there is no such key."""
    rows, n, k, *more = case.split(",")
    sizes, gated, kinds = (int(rows), int(n), int(k)), more[:1] == ["swiglu"], [kind for kind in more if kind != "swiglu"]
    if kinds:
        found: Problem = quantized_problem_of(*sizes, gated, kinds[0])
    else:
        found = Problem(sizes[0], Shape(*sizes[1:], gated), [])
    known = (*ROWS, *PROMPT_ROWS) if kinds else row_counts(found.shape, MAX_ROWS)
    if found.key != case or found.rows not in known:
        raise ValueError(case)
    return found


def _configs(case: str) -> dict[str, Config | None]:
    return {name_of(config): config for config in (None, *problem_of(case).candidates())}


def name_of(config: Config | None) -> str:
    return json.dumps(format_config(config))


def best(case: str, times: dict[str, float]) -> Config | None:
    """The winner among a case's times by `name_of`."""
    configs, problem = _configs(case), problem_of(case)
    return winner(problem.rows, {configs[name]: time for name, time in times.items()}, problem.usual())

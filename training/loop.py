"""Runs a training from its settings to its result: build the trainer, resume, train with snapshots, export."""

import argparse
import json
import uuid
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoints.hf_config import config_to_hf
from checkpoints.sources import Source
from cli import note
from comms.cluster import Cluster, load_cluster, shipped_clusters
from config import ModelConfig
from errors import RankError, UserError, first_line
from files import check_folder
from options import dtype_name
from text.tokenizer_files import find_tokenizer
from tp import World, together
from training.batches import GlobalBatches
from training.executor import Execution, Executor
from training.initialize import empty_model, materializer
from training.metrics import ModelMeter, plot_run
from training.optimizer import AdamSettings, Optimizer
from training.options import complete_router_options, complete_steps, dtype_of, execution_settings, ranks_mesh, schedule_of
from training.planner.collectives import profile_for
from training.planner.cost import forward_flops, predict
from training.planner.search import OBJECTIVE, OBJECTIVES, TOLERANCE, choose
from training.planner.workload import Workload
from training.sharding import Mesh, Sharding
from training.snapshot import Snapshots
from training.snapshot_folder import check_fits, read_manifest
from training.step import CapturedStep, Loss, Trainer, check_batch
from training.token_file import check_tokenizer, open_tokens

OPTIMIZATION = ("steps", "learning_rate", "warmup", "final_rate", "weight_decay", "clip")  # options of all training commands
ROUTERS = ("balance_loss", "router_z_loss")  # of sparse models
RECIPE = (*OPTIMIZATION, *ROUTERS, "distill", "teacher")  # what may change in the middle of a run, but only with --other-recipe


@dataclass(frozen=True)
class Setup:
    """What a command trains. It is determined before any memory is allocated."""

    config: ModelConfig
    source: Source | None  # None: random weights
    tokenizer_from: Path | None
    data: Path
    loss: Loss
    teacher: str | None = None  # the fingerprint of the weights that the loss distills


# --- the sharding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """The sharding of a run, and the planner's predicted step time if there is one."""

    sharding: Sharding
    why: str
    step_seconds: float | None = None
    intra_tensor: bool = False  # cut every tensor's optimizer states evenly, instead of giving each tensor one owner


def execution_of(args: argparse.Namespace, planned: Planned) -> Execution:
    given = execution_settings(args)
    return Execution(
        given["overlap"], args.intra_tensor or planned.intra_tensor, args.recompute, args.compile, given["bucket_bytes"]
    )


def plan(args: argparse.Namespace, config: ModelConfig, mesh: Mesh, device: torch.device) -> Planned:
    """Resolve --sharding before any memory is allocated. Raises UserError if the meshes do not nest or tile the ranks, or
    if the plan does not fit into memory."""
    workload = workload_of(args, config, mesh, device)
    if args.sharding != "auto":
        sharding = Sharding.parse(args.sharding)
        sharding.check(mesh)
        if workload is None:
            return Planned(sharding, "as given")
        found = predict(workload, sharding)
        free = _memory(device)
        if free is not None and found.memory.total > free:
            raise UserError(
                f"--sharding {args.sharding} needs about {found.memory.total / 1e9:.1f} GB a GPU of {free / 1e9:.1f}; "
                "use --sharding auto, larger meshes, --recompute or a smaller --micro-batch"
            )
        return Planned(sharding, "as given", found.step_seconds)
    if workload is None:
        return Planned(Sharding(Mesh(), Mesh(), Mesh(mesh.gpus)), "auto without a --cluster: optimizer states over a node")
    return choice(workload, _memory(device) or workload.cluster.memory_gb * 1e9)


def choice(workload: Workload, memory_bytes: float) -> Planned:
    """The planner's choice. Unless the workload has evenly cut optimizer states, it is computed with and without even cuts.
    Of the two, the one with the lower cost is taken; if the costs are within the tolerance, the one with less
    communication."""
    cuts = dict.fromkeys((workload.intra_tensor, True))
    plans = {cut: choose(replace(workload, intra_tensor=cut), memory_bytes)[0] for cut in cuts}
    cost = OBJECTIVES[OBJECTIVE]
    least = min(map(cost, plans.values()))
    close = {cut: plan for cut, plan in plans.items() if cost(plan) <= (1 + TOLERANCE) * least}
    cut, best = min(close.items(), key=lambda item: item[1].communication.total)
    return Planned(best.sharding, f"auto: the planner's choice on {workload.cluster.name}", best.step_seconds, cut)


def workload_of(args: argparse.Namespace, config: ModelConfig, mesh: Mesh, device: torch.device) -> Workload | None:
    """The planner's input; None on a CPU without --cluster."""
    cluster = _cluster(args, device)
    if cluster is None:
        return None
    cluster, profile = profile_for(cluster, mesh, args.profile_collectives)
    return Workload(
        config=config,
        mesh=mesh,
        cluster=cluster,
        profile=profile,
        global_batch=args.global_batch * args.sequence_length,
        precision=str(dtype_of(args, device)).removeprefix("torch."),
        **execution_settings(args),
    )


def _cluster(args: argparse.Namespace, device: torch.device) -> Cluster | None:
    if args.cluster:
        return load_cluster(args.cluster)
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return load_cluster(next((c for c in shipped_clusters() if c in name), "h100"))


def _memory(device: torch.device) -> float | None:
    """Bytes of this GPU's memory; None on a CPU."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


# --- before the first step -----------------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace, world: World, setup: Setup) -> tuple[Trainer, Snapshots]:
    """Check everything, set the options that depend on the data, build the trainer, and resume if asked. Collective. Raises
    UserError."""
    batches, planned = together(world, lambda: _check(args, world, setup))
    if not args.metrics_only and (setup.tokenizer_from is None or find_tokenizer(setup.tokenizer_from) is None):
        note("warning: the result will have no tokenizer, so it can only be used with token ids; name one with --tokenizer DIR")
    size = f"{setup.config.parameter_count() / 1e6:,.1f}M parameters"
    note(f"{setup.config.description}, {size}, {world.world_size} ranks; {planned.sharding} ({planned.why})")
    passes = args.steps / batches.steps_per_epoch
    note(f"{args.steps:,} steps, {passes:,.1f} passes over the data; a warm-up of {args.warmup:,} steps")
    if planned.step_seconds is not None:
        note(f"predicted step time: {planned.step_seconds * 1e3:,.0f} ms")
    run_id = [uuid.uuid4().hex]
    if world.world_size > 1:
        dist.broadcast_object_list(run_id, src=0, group=world.control)
    snapshots = Snapshots(args.out / "snapshots", world.rank, world.world_size, keep=args.keep, run_id=run_id[0])
    path = together(world, lambda: _snapshot(args, world, setup, snapshots, batches))
    trainer = together(world, lambda: build_trainer(args, world, setup, batches, planned))
    if args.cuda_graph:
        trainer.captured = CapturedStep(trainer.compute, world.device)
    if path is not None:
        together(world, lambda: trainer.restore(snapshots, path))
        note(f"resuming from {path} after step {trainer.step}")
    return trainer, snapshots


def _check(args: argparse.Namespace, world: World, setup: Setup) -> tuple[GlobalBatches, Planned]:
    check_batch(args.global_batch, world.world_size, args.micro_batch)
    if args.sequence_length > setup.config.max_seq_len:
        raise UserError(f"--sequence-length {args.sequence_length} is beyond the model's {setup.config.max_seq_len} positions")
    if args.cuda_graph and (world.world_size > 1 or world.device.type != "cuda" or args.deterministic):
        raise UserError("--cuda-graph needs one rank on a GPU, without --deterministic; leave it out")
    tokens = open_tokens(setup.data, setup.config.vocab_size)
    if setup.tokenizer_from is not None:
        check_tokenizer(tokens, setup.tokenizer_from)
    batches = GlobalBatches(tokens, args.sequence_length, args.global_batch, args.seed)
    complete_steps(args, batches.steps_per_epoch)
    complete_router_options(args, setup.config)
    mesh = ranks_mesh(args, world.world_size)
    empty_model(setup.config, world.device, dtype_of(args, world.device))
    check_folder(args.out)
    return batches, plan(args, setup.config, mesh, world.device)


def _snapshot(
    args: argparse.Namespace, world: World, setup: Setup, snapshots: Snapshots, batches: GlobalBatches
) -> Path | None:
    """The snapshot to resume from, if any. Raises UserError if there is one without --resume, or if it is from a run with
    other settings."""
    path = snapshots.latest()
    if not args.resume:
        if path is not None:
            raise UserError(f"{args.out} holds the run of {path.name}; go on with --resume, or name another --out")
        return None
    if path is None:
        note(f"no snapshot in {args.out} yet: starting from the beginning")
        return None
    now = _identity(args, setup, batches, world.device)
    now = {key: value for key, value in now.items() if not (args.other_recipe and key in RECIPE)}
    check_same(path, read_manifest(path)["meta"], now, "name another --out", RECIPE)
    empty = empty_model(setup.config, torch.device("cpu"), torch.float32)
    check_fits(path, {name: tuple(p.shape) for name, p in empty.named_parameters()})
    return path


def _identity(args: argparse.Namespace, setup: Setup, batches: GlobalBatches, device: torch.device) -> dict[str, Any]:
    distill = getattr(args, "distill", 0.0)  # of adaptation
    more = {"deterministic": args.deterministic, "distill": distill, "teacher": setup.teacher}
    more |= {key: getattr(args, key) for key in ROUTERS if setup.config.experts}
    return identity(args, setup.config, batches, device) | more


def identity(args: argparse.Namespace, config: ModelConfig, batches: GlobalBatches, device: torch.device) -> dict[str, Any]:
    """The settings of any training command that a resumed run must share with the original one, so that both have the losses of an
    uninterrupted run."""
    return {
        "model": json.loads(json.dumps(config_to_hf(config))),
        "data": batches.tokens.fingerprint,
        "dtype": dtype_name(args.dtype, device.type),
        **{key: getattr(args, key) for key in ("sequence_length", "global_batch", "seed", *OPTIMIZATION)},
    }


def check_same(
    path: Path, then: Mapping[str, Any], now: Mapping[str, Any], otherwise: str, recipe: Container[str] = ()
) -> None:
    """Raise UserError unless the run that wrote the snapshot `path` had the settings `now`; `then` are those it noted.

    otherwise: what the user can do but resume. recipe: the settings that --other-recipe lets change."""
    if unknown := sorted(now.keys() - then.keys()):
        raise UserError(
            f"{path} is from an earlier version of Rung, which did not note the run's {', '.join(unknown)}; resume with that version, "
            f"or {otherwise}"
        )
    for key, value in now.items():
        if then[key] != value:
            raise UserError(
                f"{path} comes from a run with another {key.replace('_', ' ')} ({_short(then[key])}, now {_short(value)}); "
                f"resume with that run's own settings, or {otherwise}"
                + (", or go on from there with --other-recipe" if key in recipe else "")
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def build_trainer(args: argparse.Namespace, world: World, setup: Setup, batches: GlobalBatches, planned: Planned) -> Trainer:
    """The trainer before its first step. Raises UserError if this rank's states do not fit into its GPU."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    mesh = ranks_mesh(args, world.world_size)
    model = empty_model(setup.config, world.device, dtype_of(args, world.device))
    fill = materializer(model, setup.source, args.seed)
    try:
        executor = Executor(model, fill, world.rank, planned.sharding, mesh, execution_of(args, planned))
        settings = AdamSettings(weight_decay=args.weight_decay, clip=args.clip)
        optimizer = Optimizer(executor.weights, executor.vectors, executor.groups.copy, settings)
    except torch.OutOfMemoryError:
        raise UserError(
            f"the model states do not fit into {world.device} as {planned.sharding}; shard them further with --sharding"
        ) from None
    return Trainer(
        executor,
        optimizer,
        schedule_of(args),
        batches,
        setup.loss,
        world.rank,
        world.world_size,
        args.micro_batch,
        world.device,
        (args.balance_loss, args.router_z_loss) if setup.config.experts else None,
    )


# --- the loop ------------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, world: World, trainer: Trainer, snapshots: Snapshots, setup: Setup) -> None:
    """Train to --steps with a snapshot every --save-every steps, plot the loss, and export the model. With --metrics-only: without
    snapshots and the model. Closes the executor. Collective. Raises UserError."""
    meta = _identity(args, setup, trainer.batches, trainer.device)
    last = min(args.steps, args.stop_after or args.steps)
    meter = ModelMeter(trainer, args.out / "metrics.jsonl", args.log_every, args.steps, *_flops(args, trainer))
    while trainer.step < last:
        try:
            result = torch.stack(trainer.train_step())
        except torch.OutOfMemoryError as e:
            raise RankError(
                f"rank {trainer.rank} is out of GPU memory ({first_line(e)}); "
                + ("leave out --cuda-graph, or " if args.cuda_graph else "")
                + "use --recompute or a smaller --micro-batch"
            ) from None
        saves = not args.metrics_only and (trainer.step % args.save_every == 0 or trainer.step == last)
        if saves:
            trainer.executor.synchronize()  # this communication is the step's, not the save's
        meter.add(result)
        if saves:
            with meter.saving():
                together(world, lambda: trainer.save(snapshots, meta))
    meter.close()
    together(world, snapshots.wait)
    if trainer.rank == 0:
        plot_run(args.out)
    is_done = trainer.step >= args.steps
    if is_done and not args.metrics_only:
        together(world, lambda: trainer.export(args.out / "model", setup.tokenizer_from))
    trainer.executor.close()
    if is_done:
        note(f"done: {args.out if args.metrics_only else args.out / 'model'}")
    else:
        note(f"stopped after step {trainer.step}; {'nothing was saved' if args.metrics_only else 'go on with --resume'}")


def _flops(args: argparse.Namespace, trainer: Trainer) -> tuple[float, float | None]:
    """FLOPs of a step over all ranks, and the peak FLOP/s of a device, None if unknown."""
    config = trainer.executor.model.config
    workload = workload_of(args, config, ranks_mesh(args, trainer.world_size), trainer.device)
    peak = workload.cluster.peak_flops(workload.precision) if workload is not None and trainer.device.type == "cuda" else None
    return 3 * forward_flops(config, args.sequence_length, args.global_batch), peak

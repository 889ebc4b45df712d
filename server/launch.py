"""Run one rank of the server: the engine, and on rank 0 also the frontend process, unless a launcher has started it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from checkpoints.lora import LoraLimits, open_adapter
from checkpoints.presets import model_config, warn_of_noise
from checkpoints.weights import DTYPES, chosen_dtype, load_model
from cli import check_ranks, leave, note
from config import ModelConfig, limit_context
from engine.adapters import Adapters
from engine.core import Engine
from engine.draft_models import Draft, check_accept_rate, find_draft, resolved
from engine.limits import EngineLimits
from engine.protocol import Fatal, Ready, Starting
from engine.scheduler import Scheduler
from engine.tuning import Tuning, tune
from engine.worker import FrontendLink, serve
from errors import UserError
from files import model_name
from options import ModelOptions, SharedTextOptions, SpeculationOptions, StandInOptions, rank_options
from ranks.hosts import DRAIN, Watch, await_cause, model_fact, watch
from ranks.processes import LAUNCHER, local_rank, rank, run_folder, start_ticks
from server import logs
from server.downloading import check_address
from server.journal_file import check_journal
from server.logs import log
from server.process import Frontend, describe_end, tell
from server.settings import BatchOptions, LoraOptions, Settings, load_settings, with_files
from server.started import FRONTEND, addresses, note_start
from text.tokenizer import Tokenizer, check_fits
from text.tokenizer_files import tokenizer_of
from tp import World, agree_on_error, init_world, stream_shards

SEND_SECONDS = 0.1  # time for a last message to the frontend to leave
AGENT_SECONDS = 30  # torchrun's default for the time that its ranks have to end


class Job(NamedTuple):
    """What a rank serves."""

    settings: Settings
    config: ModelConfig
    tokenizer: Tokenizer
    draft: Draft | None
    lora: LoraLimits | None


def prepare(settings: Settings, world_size: int) -> tuple[ModelConfig, Tokenizer, Draft | None]:
    """Read config and tokenizer, and the description of the draft model, if there is one. Raises UserError if the model cannot be
    served."""
    config = limit_context(
        model_config(settings.model, settings.variant, world_size, settings.quantize), settings.max_model_len
    )
    if config.kind.speed_limit and world_size > 1 and not settings.random_weights:
        raise UserError(
            f"{config.variant} writes wrong text on several ranks and is for benchmarks only; serve another variant"
        )
    stream_shards(config, 0, world_size)
    tokenizer = tokenizer_of(settings.model)
    check_fits(tokenizer, config.vocab_size)
    for remark in tokenizer.remarks:
        note(f"{model_name(settings.model)}: {remark}")
    draft = find_draft(settings.speculate, settings.model, config, tokenizer, world_size)
    check_accept_rate(settings.accept_rate, draft, settings.model)
    return config, tokenizer, draft


def lora_limits(settings: Settings, config: ModelConfig) -> LoraLimits | None:
    """The slots for adapters, None without any. Raises UserError for an adapter that the model cannot have."""
    found = [open_adapter(Path(path), config, settings.max_lora_rank).rank for _, path in settings.adapters]
    rank = 64 if settings.allow_lora_updates else 1
    if not found and not settings.allow_lora_updates:
        return None
    return LoraLimits(settings.lora_slots, settings.max_lora_rank or max(rank, *found, 1))


def describe(settings: Settings, engine: Engine, config: ModelConfig, world: World, dtype: str) -> Ready:
    blocks = engine.scheduler.blocks
    return Ready(
        model=model_name(settings.model),
        variant=config.description,
        communicator=world.comm.name,
        world_size=world.world_size,
        device=world.device.type,
        dtype=dtype + (f", {config.quantization.description}" if config.quantization else ""),
        max_model_len=engine.scheduler.longest,
        vocab_size=config.vocab_size,
        kv_blocks=blocks.n_blocks,
        block_size=blocks.block_size,
        pid=os.getpid(),
        hidden_size=config.hidden_size,
        max_batch_tokens=engine.scheduler.max_batch_tokens,
        max_num_seqs=engine.scheduler.max_num_seqs,
        causal=config.causal,
    )


def warn_of_small_cache(scheduler: Scheduler) -> None:
    """Say so if requests cannot have the whole context, because the KV cache does not hold as many tokens."""
    if scheduler.longest < scheduler.max_model_len:
        log.warning(
            "the KV cache holds %d tokens, so a request can have no more, although the context has %d: give more to --kv-memory, or "
            "accept it with --max-model-len %d",
            scheduler.longest,
            scheduler.max_model_len,
            scheduler.longest,
        )


def shared_facts(settings: Settings) -> dict[str, str]:
    """What must be the same on all hosts, by its name in messages: the flags of the engine, and the content of folders that may have
    another path on each host."""
    kinds = (ModelOptions, BatchOptions, SpeculationOptions, SharedTextOptions, StandInOptions, LoraOptions)
    flags = {one.name: getattr(settings, one.name) for kind in kinds for one in fields(kind) if one.metadata}
    speculate = resolved(settings.speculate, settings.model)
    folders = {
        "model": model_fact(settings.model),
        "speculate": speculate and model_fact(speculate),
        "lora": [(name, model_fact(path)) for name, path in settings.adapters],
    }
    here = ("tp", "lora_root")  # --tp is checked by itself
    return {f"--{name.replace('_', '-')}": str(value) for name, value in (flags | folders).items() if name not in here}


def build_engine(job: Job, world: World) -> tuple[Engine, str]:
    settings, config, tokenizer, draft, lora = job
    dtype = chosen_dtype(settings.dtype, settings.model, config, world)
    adapter_bytes = lora.bytes(config, world.world_size, DTYPES[dtype]) if lora else 0
    model = load_model(settings.model, config, world, DTYPES[dtype], adapter_bytes=adapter_bytes)
    adapters = Adapters(model, lora, world, settings.lora_root) if lora else None
    if adapters:
        adapters.load_now(settings.adapters)
    drafting = draft.load(world, DTYPES[dtype]) if draft else None
    reached("weights")
    if settings.compile:
        model.compile_modules()
    limits = EngineLimits.of(settings)
    rows = limits.max_num_seqs + limits.draft_tokens
    log_tuning(tune(model, world, rows, settings.tune_seconds, draft=drafting), settings.tune_seconds)
    engine = Engine(model, tokenizer, limits, world, drafting, adapters)
    if engine.runner.graphs is not None:
        reached("cache")
    engine.capture()
    if engine.runner.graphs is not None:
        if len((schedules := engine.runner.schedules).possible) > 1:
            log.info("a ladder's all-reduces, chosen in %.1f s: %s", schedules.spent, schedules)
        reached("graphs")
    reached("engine")
    return engine, dtype


def log_tuning(tuned: Tuning, limit: int) -> None:
    for message in tuned.messages:
        log.warning("%s", message)
    if tuned.missing and limit:
        rest = "" if len(tuned.found) == tuned.missing else "; the next start measures the others"
        done = f"{len(tuned.found)} of {tuned.missing}"
        log.info("linear layers: measured the fastest kernels of %s cases in %.1f s%s", done, tuned.seconds, rest)
        reached("tuning")


def reached(phase: str) -> None:
    """Log that a phase of the start-up is complete. `scripts/bench/serving/startup.py` reads these lines."""
    log.info("start-up: %s", phase)


def process_age() -> float:
    """Seconds since this process began, imports included; 0 on systems without /proc."""
    try:
        ticks = start_ticks(os.getpid())
    except OSError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def warn_of_torchrun(settings: Settings, environ: Mapping[str, str]) -> None:
    """If torchrun started this rank, warn of its differences from our own launcher."""
    if "TORCHELASTIC_RUN_ID" not in environ or LAUNCHER in environ:
        return
    if environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        advice = f"on one host, start with python -m server --tp {environ.get('WORLD_SIZE')} instead"
    else:
        advice = (
            "let nobody else reach these hosts, or start with launch.py --hosts N --meet HOST:PORT, which asks for a secret"
        )
    log.warning(
        "torchrun's stores listen on all interfaces without a password, and whoever reaches them can run code: %s", advice
    )
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        log.warning(
            "torchrun starts the whole server again, and requests are lost unless there is a --journal; with --tp they go on"
        )
    given = float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or AGENT_SECONDS)
    if settings.drain_timeout >= given:
        log.warning(
            "torchrun kills its ranks %g s after a signal, before --drain-timeout %g is over: set TORCH_ELASTIC_SHUTDOWN_TIMEOUT "
            "to more seconds than that, or start with --tp",
            given,
            settings.drain_timeout,
        )


def check_settings(settings: Settings, launched: bool) -> Job:
    """Raises UserError for what is wrong without the other ranks. launched: a launcher has started the frontend."""
    settings = with_files(settings)
    if rank() == 0:
        logs.configure(settings.log_format, settings.log_level)
        reached(f"import, {process_age():.3f} s after the process began")
        if not launched:  # else it was said, and a frontend has the port and the journal
            warn_of_torchrun(settings, os.environ)
            check_address(settings)
            check_journal(settings.journal, settings.journal_bounds)
    if settings.tp is not None:
        check_ranks(settings.tp)
    config, tokenizer, draft = prepare(settings, int(os.environ.get("WORLD_SIZE", 1)))
    return Job(settings, config, tokenizer, draft, lora_limits(settings, config))


def join(settings: Settings | None, error: UserError | None) -> World:
    """The world of this rank, which all ranks join, also with an error. settings: None if they cannot be read."""
    if settings is None:
        return init_world(error=error)
    return init_world(**rank_options(settings), facts=shared_facts(settings), error=error)


def warn_of_benchmarks(settings: Settings, config: ModelConfig) -> None:
    """Say what makes answers or speeds meaningless."""
    warn_of_noise(settings.model, config)
    if settings.accept_rate is not None:
        note(
            f"warning: --accept-rate: a drafted token counts as right with probability {settings.accept_rate:g}, whatever the model "
            "draws; speeds with it say nothing of real drafts' agreement"
        )


def run_engine(job: Job, world: World, frontend: Frontend | None, folder: str | None) -> int:
    """Load the model and serve until the end. Returns the exit code of the frontend that this rank has started, 0 without. folder:
    of the frontend, on rank 0."""
    link = FrontendLink(*addresses(Path(folder))) if folder and world.rank == 0 else None
    code = 0
    try:
        if link:
            link.send(Starting(os.getpid()))
        engine, dtype = build_engine(job, world)
        if world.rank == 0:
            warn_of_small_cache(engine.scheduler)
        ready = describe(job.settings, engine, job.config, world, dtype)
        if link and folder:
            ready = msgspec.structs.replace(ready, longest_start=note_start(Path(folder), process_age()))
        serve(engine, world, link, ready, frontend.is_alive if frontend else None)
    except BaseException as e:
        await_cause(e)
        if link and frontend:  # nobody else tells it
            link.send(Fatal(f"{type(e).__name__}: {e}".splitlines()[0]))
        raise
    finally:
        if link:
            link.close()
        if frontend:
            code = frontend.close()
    return code


def main() -> None:
    error = settings = job = None
    folder = os.environ.get(FRONTEND)  # of a launcher's frontend
    launched = folder is not None
    try:
        settings = load_settings(sys.argv[1:])
        job = check_settings(settings, launched)
    except UserError as e:
        error = e
    world = join(settings, error)
    agree_on_error(world, error)
    assert job is not None
    reached("process group")
    warn_of_benchmarks(job.settings, job.config)
    with contextlib.ExitStack() as stack:
        frontend = None
        if not launched and world.rank == 0:  # nobody would start ranks again that hang
            frontend = Frontend(replace(job.settings, hang_seconds=0.0), stack.enter_context(run_folder()))
        handle_signals(frontend, launched)
        if others := watch():
            tell_hosts(others, frontend)
        code = run_engine(job, world, frontend, str(frontend.folder) if frontend else folder)
    if code := describe_end(code):
        leave(code)


def tell_hosts(others: Watch, frontend: Frontend | None) -> None:
    """Let the frontend know when a host leaves, and end the whole server when any of its hosts gets a signal."""
    if frontend:

        def on_loss(reason: str) -> None:
            tell(frontend.addresses[1], Fatal(reason))
            time.sleep(SEND_SECONDS)

        others.on_loss, others.on_drain = on_loss, frontend.forward
        return
    signal.signal(signal.SIGTERM, lambda caught, frame: others.send(DRAIN))
    if local_rank() == 0:
        print(f"HTTP is served on host {others.first}, which has rank 0", file=sys.stderr, flush=True)


def handle_signals(frontend: Frontend | None, has_launcher: bool) -> None:
    """Leave signals to the launcher: it tells the frontend, and ends ranks by SIGTERM. Without one, rank 0 tells its frontend.

    A terminal sends SIGINT to the ranks, too. All ranks end once the frontend has drained.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if frontend:
            frontend.forward()

    for number in [signal.SIGINT] if has_launcher else [signal.SIGTERM, signal.SIGINT]:
        signal.signal(number, handle if frontend else signal.SIG_IGN)

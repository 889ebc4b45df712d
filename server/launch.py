"""One rank of the server: the engine, and on rank 0 the frontend beside it."""

import os
import signal
import sys
from pathlib import Path

from checkpoint import DTYPES, is_preset, load_model, model_config
from cli import leave, note
from config import ModelConfig
from engine.core import Engine, EngineLimits
from engine.protocol import Fatal, Ready
from engine.worker import FrontendLink, serve
from errors import UserError
from server.process import Frontend
from server.settings import Settings, load_settings
from tokenizer import Tokenizer, check_fits, load_tokenizer
from tp import World, agree_on_error, init_world, stream_shards


def prepare(settings: Settings, world_size: int) -> tuple[ModelConfig, Tokenizer]:
    """Read config and tokenizer. Raises UserError for whatever cannot be served."""
    if is_preset(settings.model):
        raise UserError(
            f"--model {settings.model}: a preset has no tokenizer, so it cannot be served; name a checkpoint directory"
        )
    config = model_config(settings.model, settings.variant, world_size)
    if config.variant == "upper-bound" and world_size > 1:
        raise UserError("upper-bound writes wrong text on several ranks and is for benchmarks only; serve another variant")
    stream_shards(config, 0, world_size)
    path = Path(settings.model)
    tokenizer = load_tokenizer(path.parent if path.is_file() else path)
    check_fits(tokenizer, config.vocab_size)
    return config, tokenizer


def describe(settings: Settings, engine: Engine, config: ModelConfig, world: World, dtype: str) -> Ready:
    blocks = engine.scheduler.blocks
    return Ready(
        model=settings.model,
        variant=config.description,
        communicator=world.comm.name,
        world_size=world.world_size,
        device=world.device.type,
        dtype=dtype,
        max_model_len=engine.max_model_len,
        vocab_size=config.vocab_size,
        kv_blocks=blocks.n_blocks,
        block_size=blocks.block_size,
    )


def build_engine(settings: Settings, config: ModelConfig, tokenizer: Tokenizer, world: World) -> tuple[Engine, str]:
    dtype = settings.dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
    model = load_model(settings.model, config, world, DTYPES[dtype])
    if settings.compile:
        model.compile_modules()
    limits = EngineLimits(
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_batch_tokens=settings.max_batch_tokens,
        block_size=settings.block_size,
        kv_memory=settings.kv_memory,
    )
    return Engine(model, tokenizer, limits, world), dtype


def main() -> None:
    error = settings = None
    try:
        settings = load_settings(sys.argv[1:])
        config, tokenizer = prepare(settings, int(os.environ.get("WORLD_SIZE", 1)))
    except UserError as e:
        error = e
    world = init_world(settings.device, settings.comm, settings.simulate_link) if settings else init_world()
    agree_on_error(world, error)
    assert settings is not None
    frontend = Frontend(settings) if world.rank == 0 else None
    link = FrontendLink(*frontend.addresses) if frontend else None
    for number in (signal.SIGTERM, signal.SIGINT):  # other ranks end when rank 0's frontend has drained
        signal.signal(number, frontend.forward if frontend else signal.SIG_IGN)
    try:
        engine, dtype = build_engine(settings, config, tokenizer, world)
        ready = describe(settings, engine, config, world, dtype)
        serve(engine, world, link, ready, frontend.process.is_alive if frontend else bool)
    except BaseException as e:
        if link:
            link.send(Fatal(str(e).splitlines()[0] if str(e) else type(e).__name__))
        raise
    finally:
        code = frontend.close() if frontend else 0
    if code:
        note(f"error: the HTTP frontend ended with exit code {code}")
        leave(1)

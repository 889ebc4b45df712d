"""What only GPUs can show of training: the same weights as on one GPU, replicas that stay bitwise equal over NCCL, and in a
trace the all-gathers behind the computation. Skipped where there are fewer than two."""

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attention import Causal
from config import ModelConfig, preset
from scripts.bench_training_rank import covered, kernels, merged
from training.data import Batch
from training.executor import Execution, Executor, Overlap
from training.initialize import empty_model, materializer
from training.losses import cross_entropy
from training.optimizer import AdamSettings, Optimizer, Schedule
from training.sharding import Mesh, Sharding

GPUS = torch.cuda.device_count()
WINDOWS, STEPS = 8, 10  # of a global batch; of a run
SCHEDULE = Schedule(peak=1e-3, steps=STEPS, warmup=2)
SETTINGS = AdamSettings(eps=1e-6, clip=0.5)  # eps: above the rounding noise of gradients
EXECUTION = Execution(bucket_bytes=2**18)
SMALL = replace(preset("tiny"), n_layers=3, vocab_size=256)
NO_OVERLAP = Overlap(parameters=False, gradients=False, updates=False)

pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and here are {GPUS}")


@dataclass(frozen=True)
class Run:
    sharding: Sharding
    ranks: int
    seed: int
    accumulation: int = 1
    execution: Execution = EXECUTION
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    length: int = 32  # tokens of a window
    config: ModelConfig = SMALL


# --- ranks ----------------------------------------------------------------------------------------------------------------


def on_gpus(function: Callable[[int, Run], Any], run: Run) -> list[Any]:
    """`[function(rank, run) for each rank]`, each in a process of its own with a GPU of its own, joined by NCCL."""
    if run.ranks > GPUS:
        pytest.skip(f"needs {run.ranks} GPUs, and here are {GPUS}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, run, port, function, answers), daemon=True) for rank in range(run.ranks)
    ]
    for process in processes:
        process.start()
    try:
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < run.ranks and all(ok for ok, _ in found.values()):
            rank, answer = answers.get(timeout=240)
            found[rank] = answer
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    failed = "\n".join(f"rank {rank}: {text}" for rank, (ok, text) in sorted(found.items()) if not ok)
    assert not failed, failed
    return [found[rank][1] for rank in range(run.ranks)]


def _rank(rank: int, run: Run, port: int, function: Callable[[int, Run], Any], answers: Any) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off unless asked for
    try:
        torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=run.ranks,
            timeout=timedelta(seconds=120),
            device_id=torch.device("cuda", rank),
        )
        answers.put((rank, (True, function(rank, run))))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        answers.put((rank, (False, traceback.format_exc())))


# --- training -------------------------------------------------------------------------------------------------------------


def batch(run: Run, step: int) -> Batch:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(run.seed * 1000 + step)
    windows = torch.randint(0, run.config.vocab_size, (WINDOWS, run.length + 1), generator=generator)
    return Batch(windows[:, :-1], windows[:, 1:])


def plain(run: Run) -> dict[str, Tensor]:
    """The definition: one GPU, all of the batch at once, torch's own AdamW and clipping. The weights at the end."""
    device = torch.device("cuda", 0)
    model = empty_model(run.config, device, run.dtype)
    fill = materializer(model, None, run.seed)
    for name in [name for name, _ in model.named_parameters()]:
        fill(name)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [dict(params=decayed, weight_decay=SETTINGS.weight_decay), dict(params=rest, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, betas=SETTINGS.betas, eps=SETTINGS.eps)
    for step in range(run.steps):
        for group in adam.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        tokens = batch(run, step).to(device)
        logits = model(tokens.inputs, Causal(run.length, device))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        adam.step()
        adam.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


class Trained:
    """The executor on this rank."""

    def __init__(self, rank: int, run: Run) -> None:
        self.rank, self.run, self.device, self.step = rank, run, torch.device("cuda", rank), 0
        model = empty_model(run.config, self.device, run.dtype)
        fill = materializer(model, None, run.seed)
        self.executor = Executor(model, fill, rank, run.sharding, Mesh(run.ranks), run.execution)
        weights, copy = self.executor.weights, self.executor.groups.copy
        self.optimizer = Optimizer(weights, self.executor.vectors, copy, SETTINGS)

    def train_step(self) -> None:
        run, whole = self.run, batch(self.run, self.step)
        mine = WINDOWS // run.ranks // run.accumulation
        for micro in range(run.accumulation):
            first = (micro * run.ranks + self.rank) * mine
            tokens = Batch(whole.inputs[first : first + mine], whole.targets[first : first + mine]).to(self.device)
            hidden = self.executor.forward(tokens.inputs)
            loss = cross_entropy(self.executor.model, hidden, tokens) / (WINDOWS * run.length)
            self.executor.backward(loss, last=micro == run.accumulation - 1)
        self.optimizer.step(self.executor.take_gradients(), SCHEDULE.rate(self.step))
        if not self.executor.overlap.updates:
            self.executor.synchronize()
        self.step += 1

    def weights(self) -> dict[str, Tensor]:
        """All weights, whole, on the host."""
        self.executor.synchronize()
        for weight in self.executor.weights:
            weight.gather()
            weight.wait()
        return {name: p.detach().cpu() for name, p in self.executor.model.named_parameters()}


def trained(rank: int, run: Run) -> dict[str, Any]:
    """The weights after the run, as NumPy arrays (bf16 as fp32, which is exact), which a queue hands over by value."""
    torch.backends.cuda.matmul.allow_tf32 = False
    state = Trained(rank, run)
    for _ in range(run.steps):
        state.train_step()
    return {name: value.float().numpy() for name, value in state.weights().items()}


SHARDINGS = [(1, 1, 2), (2, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("meshes", SHARDINGS, ids=lambda meshes: "-".join(map(str, meshes)))
@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_are_those_of_plain_training(ranks: int, meshes: tuple[int, ...], compiled: bool, seed: int) -> None:
    execution = replace(EXECUTION, recompute=True, compile=compiled)
    run = Run(Sharding(*map(Mesh, meshes)), ranks, seed % 1000, accumulation=2, execution=execution)
    expected = plain(run)
    for weights in on_gpus(trained, run):
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            error = ((torch.from_numpy(weights[name]) - value).norm() / value.norm()).item()
            assert error < 1e-4, f"{name}: relative error {error:.1e} under {run}"


@pytest.mark.parametrize("meshes", SHARDINGS, ids=lambda meshes: "-".join(map(str, meshes)))
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_replicas_stay_bitwise_equal(ranks: int, meshes: tuple[int, ...], seed: int) -> None:
    run = Run(Sharding(*map(Mesh, meshes)), ranks, seed % 1000, accumulation=2, dtype=torch.bfloat16)
    first, *others = on_gpus(trained, run)
    fill = materializer(empty_model(run.config, torch.device("cuda", 0), run.dtype), None, run.seed)
    matrices = {name: torch.from_numpy(value) for name, value in first.items() if value.ndim == 2}
    moved = [bool((value != fill(name).detach().float().cpu()).any()) for name, value in matrices.items()]
    assert all(moved)  # equal because trained alike, not because nothing happened
    for other in others:
        for name, value in first.items():
            assert (value == other[name]).all(), f"{name} differs between replicas under {run}"


# --- overlap --------------------------------------------------------------------------------------------------------------


def hidden_share(rank: int, run: Run) -> float:
    """The share of the all-gather kernels' time in which another kernel than NCCL's runs, in a trace of two steps."""
    state = Trained(rank, run)
    for _ in range(3):
        state.train_step()
    communication, computation = kernels(state.train_step, steps=2)
    gathers = [span for name, spans in communication.items() if "AllGather" in name for span in spans]
    assert gathers, f"no all-gather kernel among {sorted(communication)}"
    return covered(gathers, computation) / sum(end - begin for begin, end in merged(gathers))


def test_all_gathers_hide_behind_computation_unless_told_not_to(seed: int) -> None:
    large = replace(
        preset("tiny"),
        hidden_size=2048,
        n_layers=6,
        n_heads=16,
        n_kv_heads=16,
        head_dim=128,
        intermediate_size=5632,
        vocab_size=512,
        max_seq_len=2048,
    )
    run = Run(Sharding(*[Mesh(2)] * 3), 2, seed % 1000, dtype=torch.bfloat16, length=2048, config=large)
    shares = {
        overlap: on_gpus(hidden_share, replace(run, execution=Execution(overlap=overlap)))
        for overlap in (Overlap(), NO_OVERLAP)
    }
    assert min(shares[Overlap()]) > 0.3, shares
    assert max(shares[NO_OVERLAP]) < 0.1, shares

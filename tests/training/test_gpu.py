"""Training on GPUs over NCCL: the weights are the same as on one GPU, replicas stay bitwise equal, and a trace shows that
all-gathers overlap computation. Skipped without two GPUs."""

import gc
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from checkpoints.presets import preset
from config import ModelConfig
from engine.profiling import Span, intersection, length, read_trace, span_of, union
from layers.attention import Causal
from training.batches import Batch
from training.executor import Execution, Executor
from training.initialize import empty_model, materializer
from training.losses import cross_entropy
from training.optimizer import AdamSettings, Optimizer, Schedule
from training.sharding import OVERLAPS, Mesh, Sharding

GPUS = torch.cuda.device_count()
RANKS = 4 if GPUS >= 4 else 2
STEPS = 10
SCHEDULE = Schedule(peak=1e-3, steps=STEPS, warmup=2)
SETTINGS = AdamSettings(eps=1e-6, clip=0.5)  # eps is above the rounding noise of the gradients
EXECUTION = Execution(bucket_bytes=2**18)
SMALL = replace(preset("tiny"), n_layers=3, vocab_size=256)

pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and here are {GPUS}")


@dataclass(frozen=True)
class Run:
    sharding: Sharding
    seed: int
    accumulation: int = 1
    execution: Execution = EXECUTION
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    windows: int = 8  # in a global batch
    length: int = 32  # tokens in a window
    config: ModelConfig = SMALL


# --- ranks ----------------------------------------------------------------------------------------------------------------


class Gpus:
    """`RANKS` processes with one GPU each in an NCCL group. They start once and then run one function after another."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.connections: list[Any] = []

    def run(self, function: Callable[[int, Run], Any], run: Run, timeout: float = 240.0) -> list[Any]:
        """`[function(rank, run) for each rank]`. After a failure the next call starts new processes."""
        if not self.processes:
            self._start()
        try:
            for connection in self.connections:
                connection.send((function, run))
            found = self._gather(timeout)
        except BaseException:
            self.close()
            raise
        return found

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = torch.multiprocessing.get_context("spawn")
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, port), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def _gather(self, timeout: float) -> list[Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(found) < RANKS:
            left = {self.connections[rank]: rank for rank in range(RANKS) if rank not in found}
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(left.values())} did not finish within {timeout:.0f} s"
            for connection in ready:
                try:
                    ok, found[left[connection]] = connection.recv()
                except (EOFError, ConnectionError):
                    ok, found[left[connection]] = False, "the process died"
                assert ok, f"rank {left[connection]}: {found[left[connection]]}"
        return [found[rank] for rank in range(RANKS)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections = [], []


def _serve(connection: Any, rank: int, port: int) -> None:
    """The loop of a rank: run a function and send its result, until the connection closes."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is off unless the environment turns it on
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    where = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=RANKS, timeout=limit, device_id=device)
    with suppress(EOFError):
        while True:
            function, run = connection.recv()
            try:
                answer = True, function(rank, run)
            except Exception:
                answer = False, traceback.format_exc()
            connection.send(answer)
    os._exit(0)  # skips NCCL's destructors, which may wait for ranks that have ended


@pytest.fixture(scope="module")
def gpus() -> Iterator[Gpus]:
    started = Gpus()
    yield started
    started.close()


# --- training -------------------------------------------------------------------------------------------------------------


def batch(run: Run, step: int) -> Batch:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(run.seed * 1000 + step)
    windows = torch.randint(0, run.config.vocab_size, (run.windows, run.length + 1), generator=generator)
    return Batch(windows[:, :-1], windows[:, 1:])


def plain(run: Run) -> dict[str, Tensor]:
    """The reference: one GPU, the whole batch at once, torch's AdamW and clipping. Returns the final weights."""
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
    """Training with the executor on this rank."""

    def __init__(self, rank: int, run: Run) -> None:
        self.rank, self.run, self.device, self.step = rank, run, torch.device("cuda", rank), 0
        model = empty_model(run.config, self.device, run.dtype)
        fill = materializer(model, None, run.seed)
        self.executor = Executor(model, fill, rank, run.sharding, Mesh(RANKS), run.execution)
        weights, copy = self.executor.weights, self.executor.groups.copy
        self.optimizer = Optimizer(weights, self.executor.vectors, copy, SETTINGS)

    def train_step(self) -> None:
        run, whole = self.run, batch(self.run, self.step)
        mine = run.windows // RANKS // run.accumulation
        for micro in range(run.accumulation):
            first = (micro * RANKS + self.rank) * mine
            tokens = Batch(whole.inputs[first : first + mine], whole.targets[first : first + mine]).to(self.device)
            hidden = self.executor.forward(tokens.inputs)
            loss = cross_entropy(self.executor.model, hidden, tokens) / (run.windows * run.length)
            self.executor.backward(loss, last=micro == run.accumulation - 1)
        self.optimizer.step(self.executor.take_gradients(), SCHEDULE.rate(self.step))
        if "updates" not in self.executor.overlap:
            self.executor.synchronize()
        self.step += 1

    def weights(self) -> dict[str, Tensor]:
        """All weights, not sharded, on the host."""
        self.executor.synchronize()
        for weight in self.executor.weights:
            weight.gather()
            weight.wait()
        return {name: p.detach().cpu() for name, p in self.executor.model.named_parameters()}

    def close(self) -> None:
        """Free the GPU memory for the next run."""
        self.executor.close()
        del self.executor, self.optimizer
        gc.collect()
        torch.cuda.empty_cache()


def trained(rank: int, run: Run) -> dict[str, Any]:
    """The final weights as NumPy arrays, because a pipe sends these by value. bf16 is converted to fp32, which is exact."""
    state = Trained(rank, run)
    for _ in range(run.steps):
        state.train_step()
    weights = {name: value.float().numpy() for name, value in state.weights().items()}
    state.close()
    return weights


SHARDINGS = [(1, 1, RANKS), (RANKS, RANKS, RANKS), (1, RANKS, RANKS)]
if RANKS == 4:
    SHARDINGS += [(2, 2, 4), (1, 2, 2), (2, 2, 2)]
CASES = {"-".join(map(str, meshes)): (meshes, replace(EXECUTION, recompute=True)) for meshes in SHARDINGS}
CASES["intra-tensor"] = ((1, 1, RANKS), replace(EXECUTION, intra_tensor=True))
CASES["kept"] = ((RANKS // 2, RANKS, RANKS), EXECUTION)  # activations are kept, not recomputed
CASES["compiled"] = ((RANKS // 2, RANKS // 2, RANKS), replace(EXECUTION, recompute=True, compile=True))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_plain_training(gpus: Gpus, case: str, seed: int) -> None:
    meshes, execution = CASES[case]
    run = Run(Sharding(*map(Mesh, meshes)), seed % 1000, accumulation=2, execution=execution)
    expected = plain(run)
    for weights in gpus.run(trained, run):
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            error = ((torch.from_numpy(weights[name]) - value).norm() / value.norm()).item()
            assert error < 1e-4, f"{name}: relative error {error:.1e} under {run}"


@pytest.mark.parametrize("meshes", SHARDINGS, ids=lambda meshes: "-".join(map(str, meshes)))
def test_bf16_replicas_stay_bitwise_equal(gpus: Gpus, meshes: tuple[int, ...], seed: int) -> None:
    run = Run(Sharding(*map(Mesh, meshes)), seed % 1000, accumulation=2, dtype=torch.bfloat16)
    first, *others = gpus.run(trained, run)
    fill = materializer(empty_model(run.config, torch.device("cuda", 0), run.dtype), None, run.seed)
    matrices = {name: torch.from_numpy(value) for name, value in first.items() if value.ndim == 2}
    moved = [bool((value != fill(name).detach().float().cpu()).any()) for name, value in matrices.items()]
    assert all(moved)  # training changed every matrix, so equal replicas mean something
    for other in others:
        for name, value in first.items():
            assert (value == other[name]).all(), f"{name} differs between replicas under {run}"


# --- overlap --------------------------------------------------------------------------------------------------------------


def kernels(step: Callable[[], object]) -> tuple[dict[str, list[Span]], list[Span]]:
    """Profile two steps after a warm-up step. Returns the spans (µs) of NCCL's kernels by name, and of all other kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
        ) as recorder:
            for number in range(3):
                step()
                if number in (0, 2):
                    torch.cuda.synchronize()  # so that the trace has nothing of the first step and all of the last
                recorder.step()
        events = read_trace(path)["traceEvents"]
    communication: dict[str, list[Span]] = {}
    computation: list[Span] = []
    for event in events:
        if event.get("cat") == "kernel":
            nccl = event["name"].startswith("nccl")
            (communication.setdefault(event["name"], []) if nccl else computation).append(span_of(event))
    return communication, computation


def hidden_share(rank: int, run: Run) -> float:
    """The share of the all-gather kernels' time in which any kernel other than NCCL's runs, in a trace of two steps."""
    state = Trained(rank, run)
    for _ in range(3):
        state.train_step()
    communication, computation = kernels(state.train_step)
    state.close()
    gathers = union([span for name, spans in communication.items() if "AllGather" in name for span in spans])
    assert gathers, f"no all-gather kernel among {sorted(communication)}"
    return length(intersection(gathers, union(computation))) / length(gathers)


def test_all_gathers_hide_behind_computation_unless_told_not_to(gpus: Gpus, seed: int) -> None:
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
    whole, windows = Sharding(*[Mesh(RANKS)] * 3), 4 * RANKS
    run = Run(whole, seed % 1000, dtype=torch.bfloat16, windows=windows, length=2048, config=large)
    shares = {
        overlap: gpus.run(hidden_share, replace(run, execution=Execution(overlap=overlap)))
        for overlap in (frozenset(OVERLAPS), frozenset())
    }
    assert min(shares[frozenset(OVERLAPS)]) > 0.3, shares
    assert max(shares[frozenset()]) < 0.1, shares

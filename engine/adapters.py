"""The low-rank adapters of a model that serves: their slots on this rank, and loading and unloading them while it serves.

All ranks get the same messages, so they choose the same slots. Each reads its own slices in a thread and checks them. Ranks read at
different speeds, so they agree when all have read, as for grammars. Then they copy them into the slot, some layers between two
steps. An adapter that a sequence uses is not unloaded.
"""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoints.lora import AdapterFiles, LoraLimits, adapted_layers, open_adapter
from engine.protocol import Abort, AdapterDone, LoadAdapter, Submit, SubmitAll, UnloadAdapter
from errors import UserError
from kernels.lora import PREFILL_TILE, Groups, LowRank, group_rows, padded_rank
from layers.linear import LayerAdapters, ShardedLinear, StepAdapters
from model import Transformer
from tp import World, together

READING_SECONDS = 120.0  # for which a rank reads an adapter at most, with those that wait before it
COPIED_BYTES = 32 << 20  # to a slot between two steps, about
ADAPTER = "lora"  # the name of a `single_adapter`
PENDING, FAILED, READ = 0, 1, 2  # `Loading.state`

Slices = list[tuple[ShardedLinear, Tensor, Tensor]]


@dataclass(eq=False)
class Adapter:
    """number: never used again, so that the prefix cache tells adapters apart that had the same name."""

    name: str
    path: str
    slot: int
    number: int


@dataclass(eq=False)
class Loading:
    """An adapter that is being read. The thread writes `slices` or `error`, and `read` last. waiting: messages that need it."""

    adapter: Adapter
    request_id: str
    deadline: float
    waiting: list[Submit | SubmitAll | Abort] = field(default_factory=list)
    slices: Slices = field(default_factory=list)
    error: str = ""
    read: int = PENDING

    @property
    def state(self) -> int:
        if self.read == PENDING and time.monotonic() > self.deadline:
            self.error = f"the adapter {self.adapter.path} was not read within {READING_SECONDS:g} s; try again later"
            self.read = FAILED
        return self.read


class Adapters:
    """The adapters of one model on this rank."""

    def __init__(self, model: Transformer, limits: LoraLimits, world: World, root: str | None = None) -> None:
        """Allocates the slots. root: the folder from which adapters may be loaded later; None: from any."""
        self.model, self.limits, self.world, self.root = model, limits, world, Path(root) if root else None
        self.known: dict[str, Adapter] = {}
        self.loading: dict[str, Loading] = {}
        self.done: list[AdapterDone] = []  # to be sent
        self._number = 0
        self._queue: queue.SimpleQueue[Loading] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        model.step_adapters = StepAdapters()
        rank = padded_rank(limits.rank)
        for layer in adapted_layers(model):
            a = model.norm.weight.new_zeros(limits.slots, len(layer.parts), rank, layer.in_features)
            b = model.norm.weight.new_zeros(limits.slots, layer.out_features, rank)
            layer.adapters = LayerAdapters(LowRank(a, b, tuple(layer.rows)), model.step_adapters)

    @property
    def paths(self) -> dict[str, str]:
        """The folders of the adapters that are loaded, by name."""
        return {adapter.name: adapter.path for adapter in self.known.values()}

    def find(self, name: str) -> Adapter:
        """Raises UserError."""
        if name not in self.known:
            raise UserError(f"the adapter {name!r} is not loaded")
        return self.known[name]

    def all_rows(self, rows: int) -> Groups:
        """The groups of so many rows that all have the adapter in the first slot."""
        tile, device = max(rows, 1) if self.world.device.type == "cpu" else PREFILL_TILE, self.world.device
        order, tiles = group_rows(np.zeros(rows, np.int64), tile)
        return Groups(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device), tile)

    # --- at the start ------------------------------------------------------------------------------------------------------

    def load_now(self, named: Sequence[tuple[str, str]]) -> None:
        """Read and copy adapters, each a name and a folder. Collective. Raises UserError on every rank."""

        def load() -> None:
            for name, path in named:
                adapter = self._new(name, path)
                self._copy(adapter, self._read(open_adapter(Path(path), self.model.config, self.limits.rank)))
                self.known[name] = adapter

        together(self.world, load)

    # --- while it serves -----------------------------------------------------------------------------------------------------

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter. `admit` goes on with it."""
        try:
            adapter = self._new(message.name, message.path)
        except UserError as e:
            self.done.append(AdapterDone(message.request_id, message.name, message.path, str(e)))
            return
        loading = Loading(adapter, message.request_id, time.monotonic() + READING_SECONDS)
        self.loading[message.name] = loading
        self._queue.put(loading)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()

    def unload(self, message: UnloadAdapter, used: int) -> None:
        """Forget an adapter that no sequence uses. used: how many sequences do."""
        error = ""
        if message.name not in self.known:
            error = f"the adapter {message.name!r} is not loaded"
        elif used:
            error = f"{used} running or waiting answers use the adapter {message.name!r}; try again when they have ended"
        else:
            del self.known[message.name]
        self.done.append(AdapterDone(message.request_id, message.name, None, error))

    def admit(self) -> list[Loading]:
        """Go on with what is being loaded. Returns what has ended, loaded or not. Collective."""
        if not self.loading:
            return []
        states = self.world.smallest([loading.state for loading in self.loading.values()])
        ended = []
        for loading, state in zip(list(self.loading.values()), states, strict=True):
            if state == PENDING:
                continue
            error = ""
            if state == FAILED:
                error = (
                    loading.error or f"another rank could not read {loading.adapter.path}; give all hosts the same files there"
                )
            elif not self._copy_some(loading):
                continue
            else:
                self.known[loading.adapter.name] = loading.adapter
            del self.loading[loading.adapter.name]
            self.done.append(AdapterDone(loading.request_id, loading.adapter.name, loading.adapter.path, error))
            ended.append(loading)
        return ended

    def _new(self, name: str, path: str) -> Adapter:
        """An adapter with a free slot. Raises UserError if there is none, or if the name is taken."""
        if name in self.known or name in self.loading:
            raise UserError(f"an adapter {name!r} is loaded already; unload it first")
        held = [*self.known.values(), *(loading.adapter for loading in self.loading.values())]
        slot = next((i for i in range(self.limits.slots) if all(one.slot != i for one in held)), None)
        if slot is None:
            raise UserError(f"{self.limits.slots} adapters are loaded, which is --max-loras; unload one first")
        self._number += 1
        return Adapter(name, path, slot, self._number)

    def _read(self, files: AdapterFiles) -> Slices:
        """This rank's slices, in memory from which a GPU can copy without waiting. Raises UserError."""
        slices: Slices = []
        for layer in adapted_layers(self.model):
            assert layer.adapters is not None
            a, b = files.layer(layer, layer.adapters.weights)
            slices.append((layer, a.pin_memory(), b.pin_memory()) if self.world.device.type == "cuda" else (layer, a, b))
        return slices

    def _copy_some(self, loading: Loading) -> bool:
        """Copy some layers, as many on all ranks. Returns whether it has copied all."""
        largest = max(a.nbytes + b.nbytes for _, a, b in loading.slices)
        count = max(1, COPIED_BYTES // largest)
        now, loading.slices = loading.slices[:count], loading.slices[count:]
        self._copy(loading.adapter, now)
        return not loading.slices

    def _copy(self, adapter: Adapter, slices: Slices) -> None:
        for layer, a, b in slices:
            assert layer.adapters is not None
            layer.adapters.weights.a[adapter.slot].copy_(a, non_blocking=True)
            layer.adapters.weights.b[adapter.slot].copy_(b, non_blocking=True)

    def _run(self) -> None:
        while True:
            loading = self._queue.get()
            try:
                files = open_adapter(Path(loading.adapter.path), self.model.config, self.limits.rank, self.root)
                slices = self._read(files)
            except Exception as e:  # requests wait for this thread, so it must not end
                loading.error = str(e) if isinstance(e, UserError) else f"the adapter cannot be read: {type(e).__name__}: {e}"
                loading.read = FAILED
                continue
            if loading.read == PENDING:
                loading.slices, loading.read = slices, READ


def single_adapter(model: Transformer, folder: str | Path, world: World) -> Adapters:
    """The adapters of a model that has only this one, called ADAPTER. Collective. Raises UserError on every rank."""
    rank = together(world, lambda: open_adapter(Path(folder), model.config).rank)
    adapters = Adapters(model, LoraLimits(1, rank), world)
    adapters.load_now([(ADAPTER, str(folder))])
    return adapters

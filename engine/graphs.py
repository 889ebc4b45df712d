"""CUDA graphs of the engine's steps. A CPU has none: it calls the step."""

import gc
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

import torch


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

"""How many bytes of tensors an operation keeps alive at once, on a CPU, whose allocator does not say."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """The bytes now and at most of the storages that operators make inside `watched`, in any number of threads."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.RLock()  # a storage may be freed while another one is counted

    def add(self, change: int) -> None:
        with self.lock:
            self.now += change
            self.most = max(self.most, self.now)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with _Watch(self):  # modes are of a thread
            yield

    def calling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with self.watched():
                return function(*args, **more)

        return call


class _Watch(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {found.untyped_storage()._cdata for found in tree_leaves((args, kwargs)) if isinstance(found, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    given.add(storage._cdata)
                    self.live.add(storage.nbytes())
                    weakref.finalize(storage, self.live.add, -storage.nbytes())
        return out

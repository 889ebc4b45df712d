"""A clock that stands still unless a test moves it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Clock:
    """Stands for the module `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def taking(self, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, which takes `seconds`."""

        def timed(*args: Any) -> Any:
            self.now += seconds
            return work(*args)

        return timed

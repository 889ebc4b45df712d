"""The inference engine: scheduling, KV cache, sampling, stopping, and `LLM`, its Python API."""

from typing import TYPE_CHECKING, Any

from engine.protocol import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import `LLM` on first use: the server's frontend, which imports this package too, needs no model."""
    if name not in ("LLM", "Completion"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine import llm

    return getattr(llm, name)

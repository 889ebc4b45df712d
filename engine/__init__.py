"""The inference engine: scheduling, KV cache, sampling, stopping, and `LLM`, its Python API. Its files by what they do:

programs      worker (a rank of the server), llm (Python), followers (its other ranks), bench; core: the engine of a rank; limits, protocol
scheduling    sequence (and its blocks), scheduler, pace
steps         runner, step_inputs, paged_cache, schedules, tuning
tokens        sampler, grammars, thinking; adapters; text, pooling_file; constrain/, calls/: what answers must be, and have
speculation   speculation, text_drafter, model_drafter, head_model, draft_models, draft_costs
"""

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

"""A step that the runner launched, and its results."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.logprobs import PendingLogprobs
from engine.pooling import Pooled
from engine.protocol import TokenLogprobs
from engine.sequence import Chunk


@dataclass
class StepResult:
    """A token, and its log-probabilities or None, for each draw."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass
class Output:
    """A step's results on the device."""

    last: Tensor  # (W, C), the W rows from which a token is drawn
    tokens: Tensor | None  # (W,) int64, drawn with only the logits, the temperature and the seed; None on a CPU
    streams: list[Tensor]  # (T, C) each, of the runner's `stream_layers`
    hidden: Tensor | None = None  # (T, C), all rows, of a step that scores a prompt or takes a mean


@dataclass
class InFlightStep:
    """A step that was launched. `drawn` is None until its tokens are drawn."""

    chunks: list[Chunk]
    sampling: list[Chunk]  # those that sample, in the same order
    hidden: Tensor  # (W, C), the W rows of their `draws`; a later launch may overwrite it
    has_drafts: bool
    streams: list[Tensor] = field(default_factory=list)  # (T, C) each, of all rows; a later launch may overwrite them
    drawn: Tensor | None = None  # (W,) int64, on the device
    tokens: Tensor | None = None  # the same in host memory, valid after `ready`
    fault: Tensor | None = None  # of the waits for other ranks until then, valid after `ready`; see comm/faults.py
    scored: list[int] = field(default_factory=list)  # the draws whose requests ask for log-probabilities
    logprobs: PendingLogprobs | None = None  # of these, valid after `ready`
    pooled: Pooled | None = None  # valid after `ready`
    # when the device could begin the step, with its inputs laid out, and when it had the tokens; None on a CPU
    begin: "torch.cuda.Event | None" = None
    ready: "torch.cuda.Event | None" = None
    launches: tuple[str, int] = ("", 0)  # what the device runs: the graph's key, or the same of a step without a graph
    # by time.perf_counter(): when it had been launched, and when the device had its tokens; None if they were not waited for
    launched: float = 0.0
    ended: float | None = None

"""Batches of windows of a token file, in an order that depends only on the seed.

Windows are cut from documents without gaps. As is usual in pretraining, the only attention mask is the causal one, so attention
crosses documents and conversations.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from errors import UserError
from files import shown
from training.token_file import TokenFile

IGNORED = -100  # PyTorch's ignore_index


@dataclass(frozen=True)
class Batch:
    """B windows of T tokens."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64: each position's next token, IGNORED where the loss does not count it

    def to(self, device: torch.device) -> "Batch":
        return Batch(_to(self.inputs, device), _to(self.targets, device))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`, through page-locked memory for CUDA: a copy from pageable memory makes the host wait for all work
    queued before it."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class GlobalBatches:
    """Batches of `size` windows of `length` + 1 tokens. Each epoch is a permutation of the windows that depends on the
    seed and the epoch.

    The content of global batch `step` depends on nothing else, so a run can resume at any step and on any number of
    ranks. No window occurs twice in an epoch. The windows left over after the last full batch are not used in that epoch.
    Raises UserError if the file has too few windows for one batch, was packed for windows of another length, or has no
    token that the loss counts.
    """

    tokens: TokenFile
    length: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        path, window = self.tokens.path, self.tokens.header.window
        if window is not None and window != self.length + 1:
            raise UserError(
                f"{path} was packed for --sequence-length {window - 1}, not {self.length}; use that, or pack it again"
            )
        if self.windows < self.size:
            raise UserError(
                f"{path} has {len(self.tokens.tokens)} tokens: {self.windows} windows of {self.length}, fewer than a "
                f"batch of {self.size}; add data, or lower --global-batch or --sequence-length"
            )
        if not 0 <= self.seed < 2**63:  # torch's limit
            raise UserError(f"--seed must be from 0 to 2**63 - 1, not {shown(self.seed)}")
        if self.tokens.mask is not None and not self._counts.any():
            raise UserError(f"{path} has no token that the loss counts; tokenize data with assistant messages")

    @property
    def stride(self) -> int:
        """Tokens between the starts of two windows. In plain text, the last token of a window is the first of the next
        one, so that every token is predicted. Packed windows do not overlap."""
        return self.length if self.tokens.header.window is None else self.length + 1

    @property
    def windows(self) -> int:
        return max(0, (len(self.tokens.tokens) - self.length - 1) // self.stride + 1)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch; the remaining windows are not used."""
        return self.windows // self.size

    def chosen(self, step: int) -> np.ndarray:
        """The windows of global batch `step`, (size,) int64."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return order(self.windows, self.seed, epoch)[number * self.size : (number + 1) * self.size]

    def micro_batch(self, step: int, index: int, count: int) -> Batch:
        """Windows index * count … (index + 1) * count - 1 of global batch `step`. Raises UserError for a token id outside
        the header's vocabulary."""
        chosen = self.chosen(step)[index * count : (index + 1) * count]
        windows = torch.from_numpy(self._cut(self.tokens.tokens)[chosen].astype(np.int64))
        if windows.max() >= self.tokens.header.vocab_size:
            raise UserError(
                f"{self.tokens.path} holds token id {windows.max()}, but its header says that all are below "
                f"{self.tokens.header.vocab_size}: the file is damaged; tokenize the data again"
            )
        inputs, targets = windows[:, :-1], windows[:, 1:]
        if self.tokens.mask is not None:
            counted = torch.from_numpy(self._cut(self.tokens.mask)[chosen])
            targets = targets.masked_fill(counted[:, 1:] == 0, IGNORED)
        return Batch(inputs, targets)

    def _cut(self, array: np.ndarray) -> np.ndarray:
        """A view of all windows of the tokens or of their mask, (windows, length + 1)."""
        return np.lib.stride_tricks.sliding_window_view(array, self.length + 1)[:: self.stride]

    @cached_property
    def _counts(self) -> np.ndarray:
        """The number of targets of each window that the loss counts, (windows,) int64."""
        assert self.tokens.mask is not None
        return self._cut(self.tokens.mask)[:, 1:].sum(axis=1, dtype=np.int64)

    def supervised(self, step: int) -> int:
        """The number of targets of global batch `step` that the loss counts, over all ranks. Needs no communication. At
        least 1, because it is used as a divisor."""
        if self.tokens.mask is None:
            return self.size * self.length
        return max(1, int(self._counts[self.chosen(step)].sum()))


@lru_cache(maxsize=1)
def order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """The epoch's permutation of the windows, (windows,) int64."""
    return np.random.default_rng((seed, epoch)).permutation(windows)

"""The word that kernels set when they give up waiting for another rank: sums from then on are wrong."""

import torch
import torch.distributed as dist
from torch import Tensor

_words: dict[torch.device, Tensor] = {}  # of the devices whose kernels wait


def fault_word(device: torch.device) -> Tensor:
    """(1,) int32, the same for all kernels of a device: 0, or the code of a wait that gave up."""
    device = torch.empty(0, device=device).device  # with its index
    if device not in _words:
        with torch.inference_mode(False):  # `check_faults` may write it outside of that mode
            _words[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _words[device]


def raise_fault(word: Tensor) -> None:
    """Raise RuntimeError if a `fault_word`, or a copy of it, has a code."""
    if code := int(word):
        raise RuntimeError(
            f"rank {dist.get_rank()} timed out waiting for another rank's part of an all-reduce (fault code {code})"
        )


def check_faults() -> None:
    """Raise RuntimeError if a wait has given up since the last call. Waits for the devices."""
    for device, word in _words.items():
        if word.is_cuda:
            torch.cuda.synchronize(device)
        found = word.cpu().clone()
        word.zero_()
        raise_fault(found)

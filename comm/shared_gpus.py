"""Ranks that share a GPU, to try and to test what needs more GPUs than a host has.

The kernels of such ranks run in turns of a few milliseconds. Results are those of separate GPUs; times say nothing.
"""

import os

VARIABLE = "RUNG_SHARE_GPUS"  # environment variable: 1 lets ranks share GPUs


def allowed() -> bool:
    return os.environ.get(VARIABLE) == "1"


def prepare(rank: int) -> None:
    """Let NCCL and PyTorch's symmetric memory accept ranks that share a GPU. To be called before the process group exists."""
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # NCCL refuses two ranks on one GPU of a host, so each rank is a host
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

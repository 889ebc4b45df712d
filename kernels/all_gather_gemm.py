"""A linear layer of rows that other GPUs are still sending: all-gather + GEMM. The kernel waits for rows, but copies none.

Chang et al., *Flux: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion*, arXiv:2406.06858, section 3.2:
the prologue of a tile waits for the flags of its rows.
"""

from importlib import import_module

import torch
from torch import Tensor

from kernels.device import PATIENCE
from kernels.tile_gemm import BLOCK, Tiling, check_operands, default_tiling, specialized


def all_gather_gemm(
    rows: Tensor,
    weight: Tensor,
    flags: Tensor,
    epoch: Tensor,
    rank: int,
    fault: Tensor,
    tiling: Tiling | None = None,
    patience: int = PATIENCE,
) -> Tensor:
    """rows @ weight.T, (T, M) of the same dtype, where rows s * T / N to (s + 1) * T / N may arrive from source s meanwhile.

    rows (T, K) and weight (M, K): contiguous, bf16 or fp16; T a multiple of N. flags (N, blocks) int64, its rows contiguous:
    flags[s, b] reaches the number in `epoch` (1,) int64 when rows 128 b to 128 (b + 1) of source s are there (stored before, by
    a release at system scope or by a copy engine in stream order). rank: this GPU's place; its own rows must be there already,
    their flags do not matter, and they come first, then those of rank - 1, rank - 2, …. fault (1,) int32 gets 5 if a block has
    not come after `patience` polls, and the result is wrong then. epoch, flags and fault lie on the device. tiling: None for
    `default_tiling`; if a kernel of this GPU transfers rows, it needs SMs, which `Tiling.spare` leaves.

    Sums are fp32, rounded once: the same bits whatever N. Raises ValueError for operands that do not fit.
    """
    check_operands(rows, weight, len(flags))
    share = len(rows) // len(flags)
    if flags.dim() != 2 or flags.stride(1) != 1 or flags.shape[1] * BLOCK < share or not 0 <= rank < len(flags):
        raise ValueError(f"flags {tuple(flags.shape)} for {share} rows a rank in blocks of {BLOCK}, rank {rank}")
    if flags.dtype != torch.int64 or epoch.dtype != torch.int64 or fault.dtype != torch.int32:
        raise ValueError("flags and epoch must be int64, fault int32")
    chosen = tiling or default_tiling(len(rows), len(weight), rows.shape[1], len(flags))
    name = "tile_gemm_hopper" if specialized(chosen, len(rows), len(flags), rows.device) else "tile_gemm_triton"
    implementation = import_module(f"kernels.{name}")  # a machine without a GPU may have no Triton
    return implementation.all_gather_gemm(rows, weight, flags, epoch, rank, fault, chosen, patience)

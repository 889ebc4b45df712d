"""All-gather + GEMM: a linear layer of rows that other GPUs are still sending. The kernel waits for rows, but copies none.

Chang et al., *Flux: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion*, arXiv:2406.06858, section 3.2:
the prologue of a tile waits for the flags of its rows.
"""

from importlib import import_module

import torch
from torch import Tensor

from kernels.device import MAX_POLLS
from kernels.tile_gemm import BLOCK, GemmTiling, check_operands, default_tiling, specialized


def all_gather_gemm(
    rows: Tensor,
    weight: Tensor,
    flags: Tensor,
    epoch: Tensor,
    rank: int,
    fault: Tensor,
    tiling: GemmTiling | None = None,
    max_polls: int = MAX_POLLS,
) -> Tensor:
    """rows @ weight.T, (T, M) of the same dtype. Rows s * T / N to (s + 1) * T / N may arrive from rank s during the launch.

    rows (T, K) and weight (M, K): contiguous, bf16 or fp16; T a multiple of N. flags (N, blocks) int64, its rows contiguous:
    flags[s, b] is at least `epoch` (1,) int64 once rows 128 b to 128 (b + 1) of rank s have arrived: it is stored after them, by
    a release at system scope or by a copy engine in stream order. rank: of this GPU. Its own rows must be present before the
    launch and need no flags. They are multiplied first, then those of rank - 1, rank - 2, …. fault (1,) int32 is set to 5 if a
    block has not arrived after `max_polls` polls; the result is then wrong. epoch, flags and fault are on the device. tiling:
    None for `default_tiling`; if a kernel of this GPU transfers rows, `GemmTiling.free_sms` must leave SMs for it.

    Sums are in fp32 and rounded once, so the bits do not depend on N. Raises ValueError for unsupported operands.
    """
    check_operands(rows, weight, len(flags))
    rank_rows = len(rows) // len(flags)
    if flags.dim() != 2 or flags.stride(1) != 1 or flags.shape[1] * BLOCK < rank_rows or not 0 <= rank < len(flags):
        raise ValueError(f"flags {tuple(flags.shape)} for {rank_rows} rows per rank in blocks of {BLOCK}, rank {rank}")
    if flags.dtype != torch.int64 or epoch.dtype != torch.int64 or fault.dtype != torch.int32:
        raise ValueError("flags and epoch must be int64, fault int32")
    chosen = tiling or default_tiling(len(rows), len(weight), rows.shape[1], len(flags))
    name = "tile_gemm_hopper" if specialized(chosen, len(rows), len(flags), rows.device) else "tile_gemm_triton"
    implementation = import_module(f"kernels.{name}")  # a machine without a GPU may have no Triton
    return implementation.all_gather_gemm(rows, weight, flags, epoch, rank, fault, chosen, max_polls)

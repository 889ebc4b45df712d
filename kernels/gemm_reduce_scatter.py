"""GEMM + reduce-scatter without the addition: a linear layer that stores its partial sums in their owners' memory by tiles.

Chang et al., *Flux: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion*, arXiv:2406.06858, section 3.1:
the epilogue of the GEMM stores to other GPUs, so that tiles are sent while later ones are multiplied.
"""

from importlib import import_module

import torch
from torch import Tensor

from kernels.tile_gemm import GemmTiling, check_operands, default_tiling, specialized


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    destinations: tuple[int, ...],
    flags: tuple[int, ...],
    epoch: Tensor,
    rank: int,
    tiling: GemmTiling | None = None,
) -> None:
    """Store (x @ weight.T)[o * T / N : (o + 1) * T / N] at destinations[o], for each of N owners.

    x (T, K) and weight (C, K): contiguous, bf16 or fp16; T a multiple of N. destinations: addresses, as this GPU sees them, of
    contiguous (T / N, C) buffers of x's dtype in the owners' memory, multiples of 16 bytes. flags: addresses of int64. When
    rows 128 b to 128 (b + 1) of owner o (fewer at the end) are stored, the int64 at flags[o] + 8 b is set to `epoch` (1,) int64
    by a release: a GPU that acquires it sees the rows. epoch is on the device; earlier kernels, also those of the same CUDA
    graph, may advance it. rank: of this GPU among the owners. The rows of rank + 1 are computed first, its own last. tiling:
    None for `default_tiling`.

    Sums are in fp32 and rounded once, so the bits do not depend on N. Calls on one device must run one after another, and the
    first must be outside a CUDA graph's capture. Raises ValueError for unsupported operands.
    """
    check_operands(x, weight, len(destinations))
    if len(flags) != len(destinations) or not 0 <= rank < len(destinations):
        raise ValueError(f"rank {rank} of {len(destinations)} destinations and {len(flags)} flags")
    if epoch.dtype != torch.int64 or any(address % 16 for address in destinations) or any(address % 8 for address in flags):
        raise ValueError("epoch must be int64, destinations multiples of 16 bytes, flags of 8")
    chosen = tiling or default_tiling(len(x), len(weight), x.shape[1], len(destinations))
    name = "tile_gemm_hopper" if specialized(chosen, len(x), len(destinations), x.device) else "tile_gemm_triton"
    implementation = import_module(f"kernels.{name}")  # a machine without a GPU may have no Triton
    implementation.gemm_reduce_scatter(x, weight, destinations, flags, epoch, rank, chosen)

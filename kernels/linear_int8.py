"""Linear layers of many rows whose weight and input both are int8 codes with a scale for each row.

Tensor cores multiply the codes and add in int32, which is exact. TMA loads them through descriptors made on the host. Scales and bias
are applied to the sums in registers: `torch._int_mm` would write them in 32 bits, for another kernel to read. This module requires
Triton. It also runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.dispatch import pdl_options
from kernels.linear_config import SMS

TILES = (128, 256), (128, 128), (64, 128), (64, 64)  # rows of the input and of the weight, the most efficient first
FILLED = round(0.7 * SMS)  # tiles that are enough for a GPU
BLOCK_K = 128
GROUP = 16  # tiles of rows that programs compute before the next features, so that L2 holds what they read


def int8_linear(
    codes: Tensor, scales: Tensor, weight: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(R, N) of `dtype`: codes (R, K) @ weight (N, K).T, both int8, times scales (R, 1) and row_scales (N,) fp32, plus bias (N,).

    K is a multiple of 16, and less than 2^17, so that sums cannot overflow."""
    rows, k = codes.shape
    n = len(weight)
    tiles = {(m, of_n): triton.cdiv(rows, m) * triton.cdiv(n, of_n) for m, of_n in TILES}
    block_m, block_n = next((tile for tile in TILES if tiles[tile] >= FILLED), TILES[-1])
    out = torch.empty(rows, n, dtype=dtype, device=codes.device)
    _int8_linear[(tiles[block_m, block_n],)](
        TensorDescriptor.from_tensor(codes, [block_m, BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [block_n, BLOCK_K]),
        *(scales, row_scales, bias, out, rows, n, k),
        GROUP=GROUP,
        STAGES=4 if block_n == 256 else 6,
        num_warps=8 if block_n == 256 else 4,
        **pdl_options(codes.device),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _int8_linear(
    codes,  # descriptor of (rows, K)
    weight,  # descriptor of (N, K)
    scales,  # (rows,)
    row_scales,  # (N,)
    bias,  # (N,) or None
    out,  # (rows, N)
    rows, N, K,
    GROUP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = codes.block_shape[0]
    BLOCK_K: tl.constexpr = codes.block_shape[1]
    BLOCK_N: tl.constexpr = weight.block_shape[0]
    width = GROUP * tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // width * GROUP
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - first, GROUP)
    row = (first + tl.program_id(0) % width % height) * BLOCK_M
    column = tl.program_id(0) % width // height * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        a = codes.load([row, step * BLOCK_K])
        b = weight.load([column, step * BLOCK_K])
        sums = tl.dot(a, b.T, sums, out_dtype=tl.int32)
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    of_row = tl.load(scales + m, mask=m < rows, other=0)
    of_column = tl.load(row_scales + n, mask=n < N, other=0)
    result = sums.to(tl.float32) * of_column[None, :] * of_row[:, None]
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=inside)

"""GPTQ: rounds a weight column by column, and lets the columns that follow make up for each one's error (Frantar et al.,
arXiv:2210.17323)."""

import torch
from torch import Tensor

from errors import UserError
from quantized.scheme import Scheme
from quantized.weight import Quantized, check_finite, group_scales, local_group, pack, round_to, scale_dtype

BLOCK = 128  # columns whose errors reach the rest of the weight in one product
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
SCALES = [1.08 - 0.02 * i for i in range(25)]  # tried for each group, as multiples of the scale of its largest value


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, name: str) -> Quantized:
    """Round a weight (N, K) to symmetric integers so that the layer's output for its calibration inputs changes little.

    hessian (K, K) fp32: the sum of x^T x over these inputs x (rows, K). The scales are chosen before any column is changed
    (`best_scales`), and columns are rounded in descending order of the Hessian's diagonal, so the groups stay neighbours. Raises
    UserError as `weight.quantize` does.
    """
    group, diagonal = local_group(scheme, range(weight.shape[1]), name), hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    inverse = _inverse_factor(hessian[order][:, order])
    scales = best_scales(weight.unflatten(1, (-1, group)), diagonal.unflatten(0, (-1, group)), scheme)
    check_finite(scales, name)
    left = weight.float()[:, order]
    left[:, diagonal[order] == 0] = 0.0  # no input reaches these columns
    step = scales.float().repeat_interleave(group, 1)[:, order]
    codes = torch.empty_like(left, dtype=torch.int8)
    for first in range(0, len(order), BLOCK):
        block = slice(first, min(first + BLOCK, len(order)))
        errors = torch.zeros_like(left[:, block])
        for i in range(block.start, block.stop):
            codes[:, i] = round_to(left[:, i], step[:, i], None, scheme)
            errors[:, i - first] = (left[:, i] - codes[:, i] * step[:, i]) / inverse[i, i]
            left[:, i : block.stop] -= errors[:, i - first, None] * inverse[i, i : block.stop]
        left[:, block.stop :] -= errors @ inverse[block, block.stop :]
    return Quantized(pack(codes[:, order.argsort()], scheme.bits), scales)


def best_scales(groups: Tensor, importance: Tensor, scheme: Scheme) -> Tensor:
    """The scale (N, G) of each group of a weight (N, G, group) with the least squared error of its values rounded to nearest,
    weighted by `importance` (G, group): a smaller scale clips the largest values and rounds the others more finely. NaN if a value
    is not finite."""
    dtype, groups = scale_dtype(groups, scheme), groups.float()
    largest, _ = group_scales(groups, scheme, torch.float32)
    best = torch.full_like(largest, torch.nan, dtype=dtype)
    least = torch.full_like(largest, torch.inf)
    for factor in SCALES:
        scales = (factor * largest).to(dtype).clamp(min=torch.finfo(dtype).tiny)
        wide = scales.float()[:, :, None]
        errors = torch.einsum("ngi,gi->ng", (round_to(groups, wide, None, scheme) * wide - groups).square(), importance)
        best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
    return best


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse: row i tells how later columns make up for column i's error."""
    mean = hessian.diagonal().mean().clamp(min=torch.finfo(hessian.dtype).tiny)
    # more for inputs so different in size that rounding makes it indefinite
    for share in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        damped = hessian.clone()
        damped.diagonal().add_(share * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed:
                return upper
    raise UserError("the inputs of a layer are not finite, or too different in size for GPTQ; give another --calibration text")

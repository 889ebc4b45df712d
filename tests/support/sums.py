"""Communicators on CPU ranks whose kernels run in Triton's interpreter, and what their results are compared with."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tp import World

CPU = torch.device("cpu")
SHORT = 20 << 10  # capacity of a workspace: the most bytes of a message
# The interpreter truncates where it should round to bf16: a result may be one step off, and two after two roundings.
STEPS = {torch.float32: 8, torch.float16: 1, torch.bfloat16: 2}


def partials(world: World, generator: torch.Generator, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(This rank's random partial, the exact sum of all ranks' partials in fp64.) All ranks draw the same numbers."""
    by_rank = (torch.randn(world.world_size, *shape, generator=generator) * 3).to(dtype)
    return by_rank[world.rank].clone(), by_rank.double().sum(0)


def close(got: Tensor, exact: Tensor, steps: int, scale: Tensor | None = None) -> bool:
    """Whether errors are below `steps` steps of the dtype at `scale` (default: the exact result), plus 1e-5 for what fp32 loses
    when summands cancel."""
    bound = steps * torch.finfo(got.dtype).eps * (exact if scale is None else scale).abs() + 1e-5
    return bool(((got.double() - exact).abs() <= bound).all())


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether the dtype and the bits are equal, except for those of NaNs."""
    signs = got.isnan() | (got.signbit() == expected.signbit())
    return got.dtype == expected.dtype and torch.equal(got.nan_to_num(7), expected.nan_to_num(7)) and bool(signs.all())


def same_on_all_ranks(x: Tensor) -> bool:
    """Collective. All NaNs count as equal."""
    by_rank: list[bytes] = [b""] * dist.get_world_size()
    mine = x.nan_to_num(7) if x.is_floating_point() else x
    dist.all_gather_object(by_rank, mine.contiguous().view(torch.uint8).numpy().tobytes())
    return len(set(by_rank)) == 1


def symmetric(kind: Any, memory: Any = "peer") -> Any:
    """A communicator whose workspaces are only as large as tests need, because the first launch clears all of them."""
    import comms.symmetric as module

    with pytest.MonkeyPatch.context() as patch:
        for name in ("CAPACITY", "OVERLAP_CAPACITY", "FEW_SMS_CAPACITY"):
            patch.setattr(module, name, dict.fromkeys(module.KINDS, SHORT))
        made = module.SymmetricCommunicator(kind, CPU, memory=memory)
        made.use("few-sms")  # opens its buffers
        return made

"""How fast one GPU reads its memory: the ceiling of a decode step, which reads all weights.

A kernel adds up 12 GB of random integers, with several launch configurations. Each time is the median of events around single
launches.
"""

from itertools import product
from statistics import median

import torch
import triton
import triton.language as tl

WORDS, LAUNCHES = 3 * 1024**3, 8  # int32
BLOCKS, PROGRAMS_AN_SM, STAGES = (1024, 2048, 4096, 8192), (2, 4, 8, 16), (1, 4)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(x, sums, count, steps, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = (step * tl.num_programs(0) + program) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < count, other=0)
    tl.store(sums + program, tl.sum(total))


def bytes_per_second(x: torch.Tensor, block: int, programs: int, stages: int) -> float:
    """x: int32. Raises AssertionError if the sum is wrong."""
    sums = torch.empty(programs, dtype=torch.int32, device=x.device)
    seconds = []
    for _ in range(1 + LAUNCHES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        _add_up[(programs,)](x, sums, len(x), triton.cdiv(len(x), programs * block), BLOCK=block, STAGES=stages, num_warps=8)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    assert sums.sum(dtype=torch.int32) == x.sum(dtype=torch.int32), "a part was not read"
    return x.nbytes / median(seconds[1:])  # the first launch compiles


def read_ceiling() -> float:
    """Bytes/s of the fastest launch configuration."""
    x = torch.randint(-(2**31), 2**31, (WORDS,), dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    return max(
        bytes_per_second(x, block, sms * each, stages) for block, each, stages in product(BLOCKS, PROGRAMS_AN_SM, STAGES)
    )

"""One rank of test_auto.py's test on GPUs: it measures an all-reduce by each communicator of the arguments, with a host of rank 1
that is late by LATE seconds after each replay. Rank 0 prints the times in µs as JSON.
"""

import json
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from cli import run
from comms.registry import choose
from comms.table import graph_microseconds
from tp import init_world

SIZE = 4096  # values of bf16: 8 KiB
LATE = 0.005


class LateEvent(torch.cuda.Event):
    def synchronize(self) -> None:
        super().synchronize()
        time.sleep(LATE)


@torch.inference_mode()
def main() -> None:
    world = init_world("cuda", "nccl")
    if world.rank == 1:
        torch.cuda.Event = LateEvent  # type: ignore[misc]
    message = torch.zeros(SIZE, dtype=torch.bfloat16, device=world.device)
    times = {name: graph_microseconds(partial(choose("cuda", name).build().all_reduce, message)) for name in sys.argv[1:]}
    if world.rank == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

"""Run every kernel that sums over ranks on a single rank, under compute-sanitizer. `make sanitize` starts this.

It does not check results, which the tests do. compute-sanitizer checks that the kernels make no invalid memory
accesses.
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch import Tensor

from comms.interface import Communicator, check_faults
from comms.quantize import WIDTHS, parse_scheme
from comms.relay import RelayCommunicator
from comms.row_buffers import UNTILED, Gather, RowBuffers, RowShard
from comms.symmetric import KINDS, QuantizedSymmetricCommunicator, SymmetricCommunicator
from kernels import fused_rows, linear_push, linear_quantized
from quantized.scheme import SCHEMES
from quantized.weight import quantize

DEVICE = torch.device("cuda", 0)
SHAPES = ((1, 8192), (3, 1000), (16, 8192))  # rows and width of a message


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def sums(comm: Communicator) -> None:
    for rows, width in SHAPES:
        partial, x = random(rows, width), random(rows, width)
        comm.begin_all_reduce(partial.clone()).add_norm(x, random(width), 1e-5)
        if width % 16 == 0:
            comm.begin_all_reduce(partial.clone()).add_norm_codes(x, random(width), 1e-5)
        comm.begin_all_reduce(partial.clone(), overlap=True).wait()
        comm.all_reduce(partial)
        comm.all_gather(x)
    comm.check()


def pushes(comm: SymmetricCommunicator) -> None:
    exchange, weight = comm.blocking.workspace.exchange, random(8192, 2048)
    packed = linear_quantized.pack(*quantize(weight, SCHEMES["int4"], "layer")[:4])
    for rows, read in itertools.product((1, 4, 16), (weight, packed if linear_quantized.supports(weight.dtype) else None)):
        if read is not None:
            linear_push.linear_push(random(rows, 2048), read, exchange)
            linear_push.receive_add_norm(random(rows, 8192), random(8192), 1e-5, exchange)
    comm.check()


def pairs() -> None:
    buffers, shard = RowBuffers(DEVICE, 1 << 22), RowShard(300, 768, torch.bfloat16)
    for split in (*UNTILED, "tiles"):
        for pull in (False, True):
            buffers.scatter(random(300, 512), random(768, 512), split)
            fused_rows.reduce_norm_rows(buffers.layout, random(300, 768), random(768), 1e-5)
            buffers.gather_linear(shard, random(256, 768), None, Gather(split, pull, 2))
    check_faults()


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "RANK": "0", "WORLD_SIZE": "1", "NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=DEVICE)
    with torch.inference_mode():
        for kind in KINDS:
            sums(comm := SymmetricCommunicator(kind, DEVICE))
            if kind == "one-shot":
                pushes(comm)
        sums(SymmetricCommunicator("one-shot", DEVICE, memory="host"))
        for width in WIDTHS:
            sums(QuantizedSymmetricCommunicator(parse_scheme(width), DEVICE))
            sums(RelayCommunicator(parse_scheme(width), DEVICE))
        sums(RelayCommunicator(None, DEVICE))
        pairs()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Run a command's ranks as if they were on two hosts: two torchruns, each with half of the ranks and GPUs of this machine.

    python -m scripts.two_hosts --ranks 8 generate.py --model llama-3-70b:16 --variant ladder --comm nccl --prompt "Once"
    python -m scripts.two_hosts --ranks 4 --device cpu generate.py --device cpu --model models/tiny-ladder --prompt "Once upon a time"

NCCL_HOSTID makes NCCL treat the halves as different hosts. Between them it then uses neither NVLink nor shared memory, but
sockets over loopback, or InfiniBand if the machine has it. Within a half nothing changes. The command after the options is
started as `torchrun --nnodes 2` starts it on real hosts. If one half ends with an error, the other is terminated.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from cli import Parser, run
from errors import UserError
from ranks.ports import free_port
from scripts.lib.process_tree import end
from scripts.lib.results import ROOT

HOSTS = 2
GRACE_SECONDS = 35.0  # for a torchrun to end: it gives its ranks 30, and this process gets 40 itself


def torchrun(host: int, ranks: int, port: int) -> list[str]:
    """The command line that starts `ranks` ranks on one of the hosts."""
    nodes = ["--nnodes", str(HOSTS), "--node_rank", str(host), "--nproc_per_node", str(ranks)]
    rendezvous = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *rendezvous]


def environment(host: int, ranks: int, gpus: int) -> dict[str, str]:
    """The environment of a process on this simulated host: an NCCL host id, and the host's share of the GPUs, if any."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    here = os.environ | {"NCCL_HOSTID": f"host-{host}", "PYTHONPATH": path}
    if not gpus:
        return here
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    return here | {"CUDA_VISIBLE_DEVICES": ",".join(visible[host * ranks : (host + 1) * ranks])}


def start(ranks: int, command: list[str], device: str | None) -> int:
    """Run both halves of `ranks` ranks until they end. Returns the first nonzero exit code, or 0. Raises UserError."""
    if ranks < HOSTS or ranks % HOSTS:
        raise UserError(f"--ranks {ranks} cannot be divided by {HOSTS} hosts; give an even number")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus and ranks > gpus:
        most = f"give at most {gpus // HOSTS * HOSTS}, or " if gpus >= HOSTS else ""
        raise UserError(f"--ranks {ranks} need a GPU each, but this machine has {gpus}; {most}say --device cpu")
    half, port = ranks // HOSTS, free_port()
    processes: list[subprocess.Popen[Any]] = []
    try:
        for host in range(HOSTS):
            line = [*torchrun(host, half, port), *command]
            processes.append(subprocess.Popen(line, env=environment(host, half, gpus)))
        while all(process.poll() is None for process in processes):
            time.sleep(0.1)
        failed = [process.returncode for process in processes if process.returncode]
        if not failed:
            failed = [code for process in processes if (code := process.wait())]
    finally:
        end(*processes, seconds=GRACE_SECONDS)
    return abs(failed[0]) + 128 * (failed[0] < 0) if failed else 0  # as a shell reports a signal


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of both hosts together (default: 4)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device of the ranks; on cpu they need no GPU (default: CUDA if there is any)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and its arguments")
    args = parser.parse_args()
    if not args.program:
        raise UserError("nothing to start; name a script, or -m and a module")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(start(args.ranks, ["-m"] * args.module + args.program, args.device))


if __name__ == "__main__":
    run(main)

"""All-reduces of two hosts of two CPU ranks each, over a ring and hierarchically, with a slow network between the hosts and without.

    python -m scripts.bench.comm.between_hosts            # between-hosts.json and .md in out
    python -m scripts.bench.comm.between_hosts --write    # the same in docs/results, whose files are tracked

The hosts are network namespaces of this machine; `tc` slows the cable between them down, in both directions. Needs root and
iproute2. Times are medians of the slowest rank; the bytes are those that the first host's end of the cable counts.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from cli import Parser, note, run
from comm import GlooCommunicator, HierarchicalCommunicator
from comm.interface import Communicator
from errors import UserError
from ranks.ports import free_port
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.namespaces import DEVICE, TwoHosts
from scripts.lib.results import ROOT, add_write_option, results_folder, write_table
from tp import init_world

RANKS = 2  # of a host
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes of a message
RUNS = 5
SLOW = "tbf rate 200mbit burst 128kb latency 100ms"
SECONDS = 300.0


def sent_bytes() -> int:
    """What this namespace has sent over the cable."""
    line = next(line for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if line.strip().startswith(DEVICE))
    return int(line.split(":")[1].split()[8])


def measured(communicator: Communicator, size: int) -> dict[str, float]:
    """Milliseconds on the slowest rank, and bytes for each byte of the message that this host sends. Collective."""
    message, seconds, sent = torch.ones(size // 4), list[float](), list[float]()
    for _ in range(RUNS + 1):  # the first one connects the ranks
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter()
        total = communicator.all_reduce(message.clone())
        slowest = torch.tensor(time.perf_counter() - start)
        if total.min() != 2 * RANKS or total.max() != 2 * RANKS:
            raise UserError(f"{communicator.name} added wrongly")
        dist.barrier()
        sent.append((sent_bytes() - before) / size)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return {"ms": round(1e3 * median(seconds[1:]), 2), "sent": round(median(sent[1:]), 3)}


def rank_main(sizes: Sequence[int]) -> None:
    """What a rank does. Rank 0 prints a JSON list."""
    world = init_world("cpu", "gloo")
    ways = {"ring": GlooCommunicator(), "hierarchical": HierarchicalCommunicator(world.device)}
    rows = [{"bytes": size, **{name: measured(way, size) for name, way in ways.items()}} for size in sizes]
    if world.rank == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


def on_two_hosts(hosts: TwoHosts, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of a run of all ranks, for messages of these sizes in bytes. Raises UserError."""
    secret = secrets.token_hex()
    meet = ("launch.py", "--hosts", 2, "--meet", f"{hosts.addresses[0]}:{free_port()}", "--ranks", RANKS)
    program = ("-m", "scripts.bench.comm.between_hosts", "--rank", *sizes)
    processes = [
        subprocess.Popen(
            hosts.command(host, *meet, *program),
            cwd=ROOT,
            env=os.environ | {"NCCL_HOSTID": f"host-{host}", "OMP_NUM_THREADS": "1", "RUNG_MEET_SECRET": secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        outs = [process.communicate(timeout=SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        raise UserError(f"the ranks did not end within {SECONDS:g} s") from None
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise UserError(f"the ranks failed: {' '.join(err for _, err in outs)[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(outs[0][0].splitlines()[-1])
    return rows


def markdown(found: dict[str, Any]) -> str:
    head = ["cable", "message", "ring, ms", "hierarchical, ms", "ring sends", "hierarchical sends"]
    cells = []
    for cable, rows in found["cables"].items():
        for row in rows:
            ring, tree = row["ring"], row["hierarchical"]
            times = [f"{ring['ms']:.1f}", f"{tree['ms']:.1f}", f"{ring['sent']:.2f}", f"{tree['sent']:.2f}"]
            cells.append([cable, f"{row['bytes'] >> 10:,} KiB", *times])
    where = f"Two hosts of {RANKS} CPU ranks (gloo) on {describe(found['machine'], 'cpu')}; medians of {RUNS} runs, while the "
    where += f"machine's load average was {found['load_average']:.0f}. "
    caption = "*sends*: bytes that leave a host for each byte of a message, with the headers of packets."
    return captioned(head, cells, where + caption)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank_main([int(size) for size in sys.argv[2:]])
        return
    parser = Parser(description=__doc__)
    add_write_option(parser)
    folder = results_folder(parser.parse_args())
    cables = {}
    with TwoHosts() as hosts:
        for cable, shaping in (("200 Mbit/s", SLOW), ("not limited", "pfifo")):
            hosts.slow_down(shaping)
            cables[cable] = on_two_hosts(hosts, SIZES)
            note(f"{cable}: {cables[cable]}")
    found = {"machine": machine(), "tc": SLOW, "load_average": os.getloadavg()[0], "cables": cables}
    write_table("between-hosts", found, markdown(found), folder)


if __name__ == "__main__":
    run(main)

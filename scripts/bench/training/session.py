"""The ranks of `make bench-training` with --one-launch: they measure several configurations, one after the other.

    python launch.py --ranks 2 -m scripts.bench.training.session list.json --device cpu --gpus-per-node 2

list.json: a list of {"arguments": the command line of rank.py as a list, "row": the first fields of its row,
"into": a file of JSON lines}. Rank 0 appends each configuration's row to its file as soon as it is measured. A configuration
that cannot be trained gets a row with the error. One that crashes or runs out of memory in a step ends the launch.
"""

import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from cli import Parser, note, run
from errors import UserError
from scripts.bench.training.rank import join, measure, measure_links, parse_args, trace
from tp import World
from training.loop import together


def answer(arguments: list[str], world: World) -> dict[str, Any] | None:
    """A configuration's row. None for --links, which writes its own file. Collective."""
    args = parse_args(arguments)
    start = time.perf_counter()
    work = measure_links if args.links else trace if args.only_trace else measure
    try:
        row = together(world, lambda: work(args, world))
        return None if row is None else row | {"wall_s": time.perf_counter() - start}
    except UserError as e:
        return {"error": str(e)}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("list", type=Path, metavar="LIST.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True, metavar="N")
    parser.add_argument("--two-nodes", action="store_true", help="make NCCL treat the two halves of the ranks as two hosts")
    args = parser.parse_args()
    world = join(args.device, args.gpus_per_node, args.two_nodes)
    for wanted in json.loads(args.list.read_text()):
        note(" ".join(wanted["arguments"]))
        row = answer(wanted["arguments"], world)
        if row is not None and world.rank == 0:
            with Path(wanted["into"]).open("a") as file:
                file.write(json.dumps(wanted["row"] | row) + "\n")
        gc.collect()  # frees modules and hooks, which refer to each other
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(main)

"""Simulate the server in many lives, see life.py. The seed that a failure prints repeats it exactly."""

import os
import sys
import time
from collections import Counter
from multiprocessing import get_context

from cli import Parser
from tests.simulation.life import STEPS, live


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first life; the next one has the next seed (default: 0)")
    parser.add_argument("--steps", type=int, default=200_000, help="simulate at least so many (default: 200000)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="that simulate at once (default: one for each core)"
    )
    args = parser.parse_args()
    total, lives, start = Counter[str](), 0, time.monotonic()
    seeds = range(args.seed, args.seed + -(-args.steps // STEPS))
    with get_context("fork").Pool(args.processes) as pool:
        try:
            for counts in pool.imap(live, seeds) if len(seeds) > 1 else map(live, seeds):
                total, lives = total + counts, lives + 1
        except AssertionError as e:
            if len(seeds) == 1:
                raise
            sys.exit(str(e))
    print(f"{lives} lives without a failure, {total['steps'] / (time.monotonic() - start):.0f} steps/s")
    print(", ".join(f"{name} {number}" for name, number in sorted(total.items())))


if __name__ == "__main__":
    main()

"""Serve a model over HTTP, on one process or on tensor-parallel ranks.

    python -m server --model models/tiny-hybrid
    python -m server --model models/tiny-hybrid --tp 2 --port 8000

Every rank runs the same engine. Rank 0 also starts the frontend, a separate process that serves HTTP, applies chat templates
and converts between text and token ids, so that this work does not delay the engine's steps.
"""

import sys

from cli import leave, run
from processes import is_rank
from server.process import check_port
from server.settings import load_settings

STOP_SECONDS = 30.0  # time for all ranks to end, added to --drain-timeout


def main() -> None:
    """Run one rank. With `--tp` above 1 and outside of a launcher, start the ranks instead and exit with their exit code."""
    if not is_rank():
        settings = load_settings(sys.argv[1:])
        check_port(settings)
        if settings.tp is not None and settings.tp > 1:
            from launch import start_ranks  # imported here, because wrong flags need not wait for torch

            leave(start_ranks(settings.tp, ["-m", "server", *sys.argv[1:]], settings.drain_timeout + STOP_SECONDS))
    from server.launch import main as serve

    serve()


if __name__ == "__main__":
    run(main)

"""Serve a model over HTTP, on one process or on tensor-parallel ranks.

    python -m server models/tiny-hybrid
    python -m server --model models/tiny-hybrid --tp 2 --port 8000

Every rank runs the same engine. The frontend, a separate process, serves HTTP, applies chat templates and converts between text
and token ids, so that this work does not delay the engine's steps, and so that it can outlive the ranks.
"""

import sys

from cli import leave, run
from ranks.processes import is_rank
from server.downloading import answering, check_address
from server.journal_file import check_journal
from server.settings import load_settings, with_files


def main() -> None:
    """Run one rank. Outside of a launcher, start the ranks and the frontend instead, and exit with the server's exit code."""
    if not is_rank():
        settings = load_settings(sys.argv[1:])
        check_address(settings)
        check_journal(settings.journal, settings.journal_bounds)
        if settings.needs_hub:
            with answering(settings):
                settings = with_files(settings)
        from server.supervisor import run_server  # imported here, because ranks do not need torch's agent

        leave(run_server(settings, sys.argv[1:]))
    from server.launch import main as serve

    serve()


if __name__ == "__main__":
    run(main)

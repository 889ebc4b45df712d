"""Serve a model over HTTP, on one process or on tensor-parallel ranks.

    python -m server --model models/tiny-hybrid
    torchrun --standalone --nproc_per_node 2 -m server --model models/tiny-hybrid --port 8000

Every rank runs the same engine. Rank 0 also starts the frontend, a process of its own that speaks HTTP, applies templates and
turns text into ids and back, so that none of it delays a step.
"""

if __name__ == "__main__":  # the frontend's process imports this file, too, and must not wait for torch
    from cli import run
    from server.launch import main

    run(main)

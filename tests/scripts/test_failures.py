"""scripts/lib/failures.py: the line that tells why ranks failed."""

import random

from scripts.lib.failures import reason


def test_the_reason_is_a_ranks_own_line(seed: int) -> None:
    rank, kind = random.randrange(8), random.choice(("ValueError", "torch.distributed.DistBackendError", "my.OwnException"))
    said = f"W1 warning\n[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:     raise it\n[rank{rank}]: {kind}: gone\n"
    launcher = "E1 failed\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: x\n ====\nroot cause\n"
    assert reason(said + launcher) == f"{kind}: gone"
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried"
    assert reason(f"{said}[rank{rank + 1}]: {memory}\n{launcher}") == memory  # after which other ranks miss this one
    told = "error: --device cuda, but this machine shows no GPU"
    assert reason(f"W1 warning\n{told}\n{launcher}") == told


def test_without_such_a_line_it_is_the_last_one_and_never_long() -> None:
    assert (reason(""), reason("one\n two \n\n")) == ("no output", "two")
    assert reason("error: " + 999 * "x") == "error: " + 290 * "x" + "..."

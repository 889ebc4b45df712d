"""Why a command that starts ranks failed, from what it said."""

import re

STOPPED = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:[\w.]*(?:Error|Exception)|error): .*)")  # torch names the rank of a traceback
LONGEST = 300  # characters


def reason(output: str) -> str:
    """The line of a launch's output that best explains its failure: a rank's own error rather than the launcher's report."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [match[1] for match in map(STOPPED.match, lines) if match]
    own = [line for line in found if "ChildFailedError" not in line]
    memory = [line for line in own if "OutOfMemoryError" in line or "out of memory" in line]
    first = [*memory, *own, *found, *lines[-1:], "no output"][0]
    return first if len(first) <= LONGEST else first[: LONGEST - 3] + "..."

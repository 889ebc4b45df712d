"""Notes which of the repository's files this process enters. A test puts this folder on PYTHONPATH, so that every process of a server
imports it.

While the first byte of the file $ENTERED/on is not 0, the name of each file with a function that is called becomes a line of the file
$ENTERED/<process id>.
"""

import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = str(Path(__file__).resolve().parents[3]) + os.sep
FOLDER = Path(os.environ["ENTERED"])


def watch() -> None:
    with (FOLDER / "on").open("rb") as file:
        on = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    seen = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if not on[0] or event != "call" or (path := frame.f_code.co_filename) in seen:
            return
        seen.add(path)
        if path.startswith(ROOT) and not path.startswith((ROOT + "tests", ROOT + ".")):
            with (FOLDER / str(os.getpid())).open("a") as file:
                file.write(path.removeprefix(ROOT) + "\n")

    threading.setprofile(note)
    sys.setprofile(note)


watch()

"""What all tests share: the repository on `sys.path`, one torch thread, a fresh seed, and fixtures for ranks and frontends."""

import functools
import gc
import os
import random
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# The tests start hundreds of processes. They must cache the bytecode of our modules even if the environment forbids it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from tests.support import quick_start  # noqa: E402
from tests.support.ranks import Ranks  # noqa: E402

if TYPE_CHECKING:  # only the fixtures below import it when they run: most tests need neither a server nor its client libraries
    from tests.support.server_thread import Site

SEED_VARIABLE = "RUNG_TEST_SEED"
MOST_WORKERS = 5  # each starts its own ranks and servers, which take gigabytes of memory

torch.set_num_threads(1)

# A thread of gloo polls its sockets while another thread of the rank holds their lock. Linux usually lets a thread that wakes up
# preempt another one. If that holds the lock, and no core is free, gloo polls until its time slice ends: with more ranks than
# cores most of their time. SCHED_BATCH, which all child processes inherit, does without this preemption.
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A process that compiles would otherwise start workers, each of which imports torch for seconds.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# It would also try by three programs whether the compiler knows this CPU's vectors, half of the time that the tests compile.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

os.environ["HF_HUB_OFFLINE"] = "1"  # only tests/test_hub.py has a hub

# Each HTTP client makes a context for TLS, which reads all certificates of the system for 0.05 s. The tests use no TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """Set one seed for the run, also for Hypothesis. With pytest-xdist, workers inherit it from their parent."""
    # A shell starts background jobs with SIGINT ignored, and child processes would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if SEED_VARIABLE not in os.environ:
        os.environ[SEED_VARIABLE] = str(random.SystemRandom().randrange(2**31))
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = os.environ[SEED_VARIABLE]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long come first, so that at the end of a run no worker is alone with one of them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Importing all tests makes millions of objects and hardly any garbage. No garbage collection traverses them, then or later."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """The number of workers for `-n auto`, which `make test` uses: one more than cores, because tests also wait, for kills, time
    limits and idle servers. With a GPU, 0: tests run one at a time, as they measure GPU memory."""
    return 0 if torch.cuda.is_available() else min(MOST_WORKERS, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(("fresh inputs", f"run again with {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"))


@pytest.fixture(scope="session")
def session_seed() -> int:
    return int(os.environ[SEED_VARIABLE])


@pytest.fixture
def seed(session_seed: int, request: pytest.FixtureRequest) -> int:
    """A seed for this test's inputs. It differs in each run and repeats if RUNG_TEST_SEED is set. It also seeds torch and
    random. Products of fp32 are exact again: training, in a test before, allows TF32 in its process."""
    number = random.Random(f"{session_seed} {request.node.nodeid}").randrange(2**31)
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(number)
    random.seed(number)
    return number


@pytest.fixture(scope="session")
def in_turn(session_seed: int) -> Callable[..., Any]:
    """`in_turn(choices, place)`: one of the choices for the case with this number. In a run, successive cases get successive
    choices. The first one differs in each run, so over the runs each case gets every choice."""
    return lambda choices, place: list(choices)[(session_seed + place) % len(choices)]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to 8 gloo ranks: `ranks.run(2, function, *args)`."""
    started = Ranks(8)
    yield started
    started.close()


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Ranks]:
    """Up to 4 ranks whose Triton kernels run in the interpreter. `interpreters.call(function, *args)` uses only one of them."""
    pytest.importorskip("triton", reason="Triton is not installed; pip install triton")
    started = Ranks(4, {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    yield started
    started.close()


@pytest.fixture
def forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python commands that the code under test starts are forked from a process that has imported what they need."""
    monkeypatch.setattr(subprocess, "Popen", quick_start.Popen)


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Site"]:
    from tests.support.server_thread import Site

    started = Site(tmp_path_factory.mktemp("z")).start()
    yield started
    started.close()


@pytest.fixture
def site(shared_site: "Site") -> Iterator["Site"]:
    """The module's frontend. After each test its requests have ended, and its fake engine has the default behaviour again."""
    engine = shared_site.engine
    default = engine.reply
    yield shared_site
    engine.reply, engine.group, engine.together, engine.delay, engine.hold = default, 1, 1, 0.0, False
    shared_site.settle()


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., "Site"]]:
    """Makes frontends for one test, with the settings that it gives."""
    from tests.support.server_thread import Site

    made: list[Site] = []

    def make(start: bool = True, engine: bool = True, **settings: Any) -> Site:
        made.append(Site(tmp_path, **settings))
        return made[-1].start(engine) if start else made[-1]

    yield make
    for one in made:
        if one.thread.is_alive():
            one.close()

"""Put real routers in front of two servers on CPU, and write whether they balance, keep prefixes, retry and drain.

    python -m tests.routers                          # all; out/routers.md has the table
    python -m tests.routers --only sglang_router     # one
    python -m tests.routers --write                  # into docs/results, which docs/replicas.md quotes
    python -m tests.routers --production-stack DIR   # also the router of vLLM's production stack, from a checkout in DIR

Each router gets an environment of its own in ~/.cache/rung/routers (RUNG_CACHE: another folder) from PyPI. The production stack's
router is not on PyPI; its requirements are. The servers have one CPU rank each and an embedded model. The table also has the stored
results of routers that this call does not run. Exits with 2 if a check that it runs fails.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cli import Parser, note, run
from errors import UserError
from ranks.ports import free_port
from scripts.lib.markdown import table_lines
from scripts.lib.process_tree import end, kill, process_tree
from scripts.lib.results import OUT, RESULTS, ROOT, add_write_option, results_folder, write_table, write_text
from scripts.lib.servers import READY_SECONDS, STOP_SECONDS, is_healthy, running
from tests.clients.recorder import Request, recording, shape_of
from tests.support.environments import install

HERE = Path(__file__).parent
FIXTURES = ROOT / "tests" / "server" / "fixtures" / "routers"
MODEL = ROOT / "models" / "tiny-hybrid"
TITLES = {"sglang_router": "sglang-router", "vllm_router": "vllm-router", "production_stack": "production stack"}
CHECKS = ("balance", "prefix", "retry", "return", "drain", "stream")
SECONDS = 300.0  # for a request, and for a router to notice something
REQUESTS, CLIENTS = 32, 8
PREFIX, SHARED, GROUPS = 400, 6, 4  # characters of a prefix; requests that share it; prefixes
SHARE = 0.1  # a server that gets less gets no requests, but perhaps those by which a router checks its health

Row = dict[str, Any]  # check, ok, detail


# --- servers --------------------------------------------------------------------------------------------------------------


class Replica:
    """A server that can be killed and started again at the same address."""

    def __init__(self, log: Path) -> None:
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = ["--tp", "1", "--port", str(self.port), "--model", str(MODEL), "--drain-timeout", "60", "--max-num-seqs", "16"]
        with self.log.open("ab") as output:
            command = [sys.executable, "-m", "server", *flags]
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def wait(self) -> None:
        if not is_healthy(self.url, READY_SECONDS):
            raise UserError(f"a server was not ready within {READY_SECONDS:g} s; see {self.log}")

    def kill(self) -> None:
        """End all its processes at once, as a host that loses power does."""
        assert self.process
        kill(process_tree(self.process.pid))
        self.process.wait()

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name; those that differ in labels only are added up."""
        text = httpx.get(f"{self.url}/metrics", timeout=SECONDS, trust_env=False).text
        found: dict[str, float] = {}
        for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


@contextmanager
def replicas(folder: Path) -> Iterator[tuple[Replica, Replica]]:
    pair = Replica(folder / "server-0.log"), Replica(folder / "server-1.log")
    try:
        for one in pair:
            one.log.write_bytes(b"")
            one.start()
        for one in pair:
            one.wait()
        yield pair
    finally:
        for one in pair:
            if one.process:
                end(one.process, seconds=STOP_SECONDS)


# --- routers --------------------------------------------------------------------------------------------------------------


def command(name: str, folder: Path, urls: Sequence[str], port: int) -> list[str]:
    """The command of a router that routes by prefix and often looks at its servers."""
    bin = folder / "venv" / "bin"
    address = f"--host 127.0.0.1 --port {port}"
    if name == "production_stack":
        backends = f"--service-discovery static --static-backends {','.join(urls)} --static-models {MODEL.name},{MODEL.name}"
        health = (
            "--static-backend-health-checks --static-model-types completion,completion --static-backend-health-check-interval 5"
        )
        routing = "--routing-logic prefixaware --max-instance-failover-reroute-attempts 5 --engine-stats-interval 1"
        return f"{bin}/python -m vllm_router.app {address} {backends} {health} {routing}".split()
    start = f"{bin}/python -m sglang_router.launch_router" if name == "sglang_router" else f"{bin}/vllm-router"
    health = "--health-check-interval-secs 1 --health-failure-threshold 1 --health-success-threshold 1"
    other = f"--policy cache_aware --worker-startup-check-interval 1 --prometheus-port {free_port()}"
    return f"{start} {address} {health} {other} --worker-urls {' '.join(urls)}".split()


@dataclass
class Site:
    """A router, its two servers, and what became of the requests."""

    url: str
    pair: tuple[Replica, Replica]
    failures: list[str] = field(default_factory=list)

    def complete(self, prompt: str, tokens: int = 8, **body: Any) -> bool:
        body = {"model": MODEL.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **body}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=SECONDS, trust_env=False)
        except httpx.HTTPError as e:
            self.failures.append(repr(e))
            return False
        if answer.status_code != 200 or not (body.get("stream") or answer.json()["usage"]["completion_tokens"] == tokens):
            self.failures.append(f"{answer.status_code} {answer.text[:200]}")
            return False
        return not body.get("stream") or answer.text.rstrip().endswith("data: [DONE]")

    def counts(self, name: str) -> list[float]:
        """A counter of both servers."""
        return [one.metrics()[f"vllm:{name}_total"] for one in self.pair]

    def load(self, word: str, tokens: int = 24, disturb: Any = None) -> list[bool]:
        """Send REQUESTS from CLIENTS clients. `disturb` runs when a quarter of them has been answered."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            sent: list[Future[bool]] = [
                pool.submit(self.complete, f"{i} {word}: different from the first character on", tokens)
                for i in range(REQUESTS)
            ]
            if disturb:
                for one in sent[: REQUESTS // 4]:
                    one.result()
                disturb()
            return [one.result() for one in sent]

    def spread(self, word: str) -> tuple[bool, list[float]]:
        """Whether all requests of a load were answered, and each server's share of the answers' tokens."""
        before = self.counts("generation_tokens")
        done = self.load(word)
        grown = [now - then for now, then in zip(self.counts("generation_tokens"), before, strict=True)]
        return all(done), [one / max(sum(grown), 1) for one in grown]


@contextmanager
def routed(name: str, folder: Path, pair: tuple[Replica, Replica], urls: Sequence[str], log: Path) -> Iterator[Site]:
    port = free_port()
    with running(command(name, folder, urls, port), port, log, **environment(folder)) as router:
        site = Site(router.url, pair)
        until(lambda: site.complete("Hello"), "the router has not answered a request")
        site.failures.clear()
        yield site


def environment(folder: Path) -> dict[str, str]:
    source = folder / "source"  # a link to a checkout
    return {"PYTHONPATH": str(source / "src")} if source.exists() else {}


def until(condition: Any, message: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise UserError(f"{message} within {SECONDS:g} s")
        time.sleep(0.2)


# --- checks ---------------------------------------------------------------------------------------------------------------


def balance(site: Site) -> Row:
    """Different prompts reach both servers."""
    done, shares = site.spread("Balance")
    return {"ok": done and min(shares) > SHARE, "detail": f"{100 * min(shares):.0f} % of the tokens by the less busy server"}


def prefix(site: Site) -> Row:
    """Requests that share a long prefix find it in one server's cache."""
    done, together, hits = [], 0, 0.0
    for group in range(GROUPS):
        start = (f"In story number {group + 1} there is a fox named {'ABCDEFGH'[group]}. " * 40)[:PREFIX]
        before = site.counts("prefix_cache_hits")
        done += [site.complete(f"{start} Chapter {i}:") for i in range(SHARED)]
        grown = [now - then for now, then in zip(site.counts("prefix_cache_hits"), before, strict=True)]
        together += sum(one > 0 for one in grown) == 1
        hits += sum(grown)
    detail = f"{together} of {GROUPS} prefixes at one server, {hits / GROUPS / (SHARED - 1):.0f} tokens of each further prompt in its cache"
    return {"ok": all(done) and together >= GROUPS - 1, "detail": detail}


def retry(site: Site) -> Row:
    """A server is killed under load. No request fails, because the router sends those again that it had."""
    done = site.load("Kill", disturb=site.pair[1].kill)
    return {"ok": all(done), "detail": f"{sum(done)} of {len(done)} requests answered, one server killed"}


def come_back(site: Site) -> Row:
    """The killed server, started again, gets requests."""
    site.pair[1].start()
    site.pair[1].wait()
    began, answered, shares = time.monotonic(), True, [1.0, 0.0]
    while shares[1] <= SHARE and time.monotonic() < began + SECONDS:
        done, shares = site.spread(f"Again {time.monotonic()}")
        answered = answered and done
    detail = f"{100 * shares[1]:.0f} % of the tokens {time.monotonic() - began:.0f} s after it was ready again"
    return {"ok": answered and shares[1] > SHARE, "detail": detail}


def drain(site: Site) -> Row:
    """A server gets SIGTERM under load: it refuses new requests so that they go elsewhere, and finishes those that run."""
    drained, seen = site.pair[0], dict[str, Any]()

    def disturb() -> None:
        assert drained.process
        with (
            httpx.Client(base_url=drained.url, timeout=SECONDS, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=SLOW) as slow,
        ):
            text = slow.iter_text()
            begun = next(text)  # the server has accepted it
            drained.process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/health").status_code == 503, "the server did not drain")
            refused = client.post("/v1/completions", json={"prompt": "x"})
            events = begun + "".join(text)
        seen.update(status=refused.status_code, retry_after=refused.headers.get("retry-after"), health=503)
        seen["running"] = f'"completion_tokens":{SLOW["max_tokens"]}' in events and events.endswith("data: [DONE]\n\n")

    done = site.load("Drain", disturb=disturb)
    assert drained.process
    code = drained.process.wait(SECONDS)
    ok = all(done) and code == 0 and seen == {"status": 503, "retry_after": "1", "health": 503, "running": True}
    return {"ok": ok, "detail": f"{sum(done)} of {len(done)} requests answered, one server drained (exit code {code}): {seen}"}


SLOW: dict[str, Any] = {"prompt": "A long story", "max_tokens": 160, "ignore_eos": True, "stream": True}
SLOW["stream_options"] = {"include_usage": True}


def stream(site: Site) -> Row:
    """A stream passes with its last event, and so does a chat."""
    streamed = site.complete("Stream", 16, stream=True)
    body = {"model": MODEL.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    chat = httpx.post(f"{site.url}/v1/chat/completions", json=body, timeout=SECONDS, trust_env=False)
    ok = streamed and chat.status_code == 200 and bool(chat.json()["choices"])
    return {"ok": ok, "detail": "text and chat" if ok else f"{site.failures[-1:]}, chat {chat.status_code} {chat.text[:200]}"}


CHECK = {"balance": balance, "prefix": prefix, "stream": stream, "retry": retry, "return": come_back, "drain": drain}


def attempt(name: str, folder: Path, kept: Path) -> tuple[list[Row], list[Request]]:
    """All checks with one router, and the requests that it sends to a server."""
    rows = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        pair = stack.enter_context(replicas(Path(logs)))
        with (
            recording(pair[0].url) as ((url,), taken),
            routed(name, folder, pair, (url, pair[1].url), kept / f"{name}-recorded.log") as site,
        ):
            site.load("Record", 2)
            stream(site)
        site = stack.enter_context(routed(name, folder, pair, [one.url for one in pair], kept / f"{name}.log"))
        for check, function in CHECK.items():
            site.failures.clear()
            try:
                row = function(site)
            except (UserError, httpx.HTTPError, subprocess.TimeoutExpired) as e:
                row = {"ok": False, "detail": str(e)}
            rows.append({"check": check, **row, "failures": site.failures[:4]})
            note(f"{name}, {check}: {'yes' if row['ok'] else 'NO'}: {row['detail']} {site.failures[:2] or ''}")
        for one in pair:
            (kept / f"{name}-{one.log.name}").write_bytes(one.log.read_bytes())
    return rows, taken


# --- results --------------------------------------------------------------------------------------------------------------


def shapes(taken: Sequence[Request]) -> list[Request]:
    """One request of each shape."""
    kept: dict[str, Request] = {}
    for one in taken:
        kept.setdefault(json.dumps([one["method"], one["path"], shape_of(one["body"])]), one)
    return list(kept.values())


def table(results: dict[str, Any]) -> str:
    lines, notes = [], []
    for name, result in results.items():
        found = {row["check"]: row for row in result["rows"]}
        cells = ["–" if check not in found else "yes" if found[check]["ok"] else "**no**" for check in CHECKS]
        lines.append([f"{TITLES[name]} {result['version']}", *cells])
        notes += [f"- {TITLES[name]}, {row['check']}: {row['detail']}" for row in result["rows"] if not row["ok"]]
    below = ["", "What failed:", "", *notes] if notes else []
    return "\n".join([*table_lines(["router", *CHECKS], lines), *below]) + "\n"


def version(name: str, source: Path | None) -> str:
    if source and name == "production_stack":
        done = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=source, capture_output=True, text=True)
        return done.stdout.strip() or "(a checkout)"
    return (HERE / name / "requirements.txt").read_text().partition("==")[2].strip()


def fail_if_any_failed(ran: dict[str, Any]) -> None:
    """Raise UserError if a check of the routers that this call has run failed. The table also has stored results of others."""
    if number := sum(not row["ok"] for result in ran.values() for row in result["rows"]):
        raise UserError(f"{number} checks failed; see out/routers")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=TITLES,
        metavar="NAME",
        help=f"only these: {', '.join(TITLES)}; without a name, only write the table",
    )
    parser.add_argument("--production-stack", type=Path, metavar="DIR", help="a checkout of vLLM's production stack")
    parser.add_argument("--record", action="store_true", help="write the requests of the routers to tests/server/fixtures")
    add_write_option(parser)
    args = parser.parse_args()
    folder, kept = results_folder(args), OUT / "routers"
    kept.mkdir(parents=True, exist_ok=True)
    names = [
        name for name in (TITLES if args.only is None else args.only) if name != "production_stack" or args.production_stack
    ]
    ran: dict[str, Any] = {}
    for name in names:
        home = install("routers", name, HERE / name / "requirements.txt")
        if name == "production_stack":
            with suppress(FileNotFoundError):
                (home / "source").unlink()
            (home / "source").symlink_to(args.production_stack.resolve())
        rows, taken = attempt(name, home, kept)
        ran[name] = {"version": version(name, args.production_stack), "rows": rows}
        write_text(kept / f"{name}.json", json.dumps(ran[name], indent=1) + "\n")
        if args.record:
            write_text(FIXTURES / f"{name}.json", json.dumps(shapes(taken), indent=1) + "\n")
    results = json.loads((RESULTS / "routers.json").read_text())  # of the routers that were not run here
    files = {name: kept / f"{name}.json" for name in TITLES}
    results |= {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    write_table("routers", results, table(results), folder)
    fail_if_any_failed(ran)


if __name__ == "__main__":
    run(main)

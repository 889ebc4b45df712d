"""Compare what commands print and what the server answers with a kept copy, before and after a change of the structure.

    python -m tests.fence                   # names each difference; exit code 1 if there is one
    python -m tests.fence --only http help  # parts of it
    python -m tests.fence --write           # keep today's outputs

Everything runs as a user would run it, so no move of a module can break it: `generate.py` for each embedded model on 1, 2 and 4
ranks, greedy and sampled; requests to all APIs of a server on 2 ranks, whole and streamed; `--help` of the commands.
Ids and times are replaced by their kind. Tokens come from fp32 on a CPU.
"""

import argparse
import difflib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

KEPT = Path(__file__).parent / "golden"
MODELS = sorted(str(path) for path in Path("models").iterdir() if (path / "config.json").exists())
RANKS = 1, 2, 4
PROMPT, QUESTION = "Once upon a time", "What is 17 plus 25?"
DRAWS = {
    "greedy": ["--temperature", "0"],
    "sampled": ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "50", "--seed", "7"],
}
COMMANDS = [
    ["generate.py"], ["launch.py"], ["-m", "server"], ["-m", "engine.bench"], ["-m", "training.convert"], ["-m", "deploy.plan"],
    ["-m", "training.train"], ["-m", "training.adapt"], ["-m", "training.plan"], ["-m", "scripts.quantize"], ["-m", "scripts.sweep"],
]  # fmt: skip
CHANGING = {"created", "created_at", "completed_at", "started", "last_seen", "version", "root"}
ID = re.compile(r"\b(chatcmpl|cmpl|resp|msg|call|fc|rs|req|toolu|embd|score|ctc|rung)([-_])[0-9A-Za-z_-]{6,}")
TOOL = {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}}  # fmt: skip


def requests() -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """(method, path, body) of each request, in the order in which they are sent."""
    for path in ("/v1/models", "/health", "/ping", "/load", "/nothing", "/v1/models/other"):
        yield "GET", path, None
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    story: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    ask: dict[str, Any] = {"input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    message: dict[str, Any] = {**chat, "model": "tiny-hybrid"}
    forced = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOL["parameters"]}}
    for stream in (False, True):
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "n": 3, "temperature": 0.8, "seed": 5, "logprobs": True, "top_logprobs": 2}),
            ("/v1/chat/completions", {**chat, **forced}),
            ("/v1/chat/completions", {**chat, "response_format": shape, "stop": ["}"]}),
            ("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}} if stream else {**chat, "min_p": 0.1}),
            ("/v1/completions", story),
            ("/v1/completions", {**story, "echo": True, "logprobs": 3, "stop": ["."]}),
            (
                "/v1/completions",
                {**story, "prompt": [PROMPT, QUESTION], "n": 2, "temperature": 1, "seed": 3, "presence_penalty": 1},
            ),
            ("/v1/completions", {**story, "structured_outputs": {"choice": ["yes", "no"]}}),
            ("/v1/responses", ask),
            (
                "/v1/responses",
                {**ask, "instructions": "Be short.", "tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
            ),
            ("/v1/messages", message),
            ("/v1/messages", {**message, "system": "Be short.", "stop_sequences": ["2"]}),
        ):
            yield "POST", path, {**body, "stream": stream}
    yield "POST", "/v1/embeddings", {"input": [PROMPT, QUESTION], "dimensions": 4}
    yield "POST", "/v1/messages/count_tokens", message
    yield "POST", "/v1/responses/input_tokens", {"input": QUESTION}
    yield "POST", "/tokenize", {"prompt": PROMPT, "return_token_strs": True}
    yield "POST", "/detokenize", {"tokens": [5, 6, 7]}
    for wrong in (
        {},
        {**chat, "temperature": 9},
        {**chat, "model": "other"},
        {**chat, "n": 1000},
        {**chat, "messages": []},
        {**chat, "unknown": 1},
    ):
        yield "POST", "/v1/chat/completions", wrong


def scrubbed(value: Any) -> Any:
    """`value` of JSON without what differs in every run. Fractions keep four digits."""
    if isinstance(value, dict):
        return {key: type(inner).__name__ if key in CHANGING else scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [scrubbed(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return ID.sub(r"\1\2ID", value) if isinstance(value, str) else value


def text_of(body: str) -> list[Any]:
    """The JSON of a whole answer or of each event of a stream; else its lines."""
    found: list[Any] = []
    for line in body.splitlines():
        start = "data: " if line.startswith("data: ") else ""
        try:
            found.append(scrubbed(json.loads(line.removeprefix(start))))
        except ValueError:
            found.append(line)
    return found


def run(*args: str) -> str:
    """stdout of a Python command that must succeed."""
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(args)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def helps() -> dict[str, Any]:
    return {" ".join(command): run(*command, "--help").splitlines() for command in tqdm(COMMANDS, "help")}


def tokens() -> dict[str, Any]:
    cases = [(model, ranks, draw) for model in MODELS for ranks in RANKS for draw in DRAWS]
    found = {}
    for model, ranks, draw in tqdm(cases, "tokens"):
        lines = run("generate.py", "--model", model, "--tp", str(ranks), "--prompt", PROMPT, "--max-new-tokens", "48",
                    "--num-samples", "2", "--json", *DRAWS[draw])  # fmt: skip
        samples = [json.loads(line) for line in lines.splitlines()]
        found[f"{Path(model).name} x{ranks} {draw}"] = [sample["text"] for sample in samples]
    return found


@contextmanager
def server(port: int = 8973) -> Iterator[int]:
    """The port of a server on 2 ranks that answers."""
    command = [
        sys.executable,
        "-m",
        "server",
        "--tp",
        "2",
        "--model",
        "models/tiny-hybrid",
        "--port",
        str(port),
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                if send(port, "GET", "/health", None)[0] == 200:
                    break
            except OSError:
                pass
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("the server does not answer")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def send(port: int, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def answers() -> dict[str, Any]:
    found = {}
    with server() as port:
        for method, path, body in tqdm(list(requests()), "http"):
            status, text = send(port, method, path, body)
            found[f"{method} {path} {json.dumps(body)}"] = [status, *text_of(text)]
    return found


PARTS = {"help": helps, "http": answers, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fence", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="parts to compare (default: those that are kept)")
    parser.add_argument("--write", action="store_true", help="keep today's outputs instead of comparing with the kept ones")
    args = parser.parse_args()
    differ = 0
    for part in args.only or [part for part in PARTS if args.write or (KEPT / f"{part}.json").exists()]:
        file = KEPT / f"{part}.json"
        now = PARTS[part]()
        if args.write:
            KEPT.mkdir(exist_ok=True)
            file.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
            continue
        kept = json.loads(file.read_text())
        for name in {**kept, **now}:
            old, new = (json.dumps(side.get(name), indent=1, ensure_ascii=False).splitlines() for side in (kept, now))
            if old != new:
                differ += 1
                print(
                    f"{part}: {name}", *list(difflib.unified_diff(old, new, "kept", "now", lineterm="", n=1))[2:40], sep="\n  "
                )
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()

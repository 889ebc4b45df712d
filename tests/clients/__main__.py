"""Try the real client libraries, benchmarks and coding agents against this server, and write which features work.

    python -m tests.clients                      # all, those that are not done yet; out/clients.md has the table
    python -m tests.clients --only openai_py     # one, again
    python -m tests.clients --write              # into docs/results, which docs/api.md names

Each client gets an environment of its own in ~/.cache/rung/clients (RUNG_CACHE: another folder), 9 GB in all, from PyPI and npm.
The server runs on one CPU rank with an embedded model. The prompts of coding agents have tens of thousands of tokens, so their
server has the first layers of the embedded model with room for 131,072 positions, more than it was trained with: requests are
answered, but the answers are nonsense. Reasoning comes from a server with a scripted engine. Exits with 2 if a feature failed.

Needs Python, npm and Node 20 or newer, and a network for the first run. Runs one client at a time.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tqdm import tqdm

from cli import Parser, note, run
from errors import UserError
from scripts.lib.markdown import table_lines
from scripts.lib.results import OUT, ROOT, add_write_option, results_folder, write_table, write_text
from scripts.lib.servers import rung_server
from tests.clients.recorder import Request, fixture, recording
from tests.clients.thinking import thinking_server
from tests.support.adapters import PARTS, write_adapter
from tests.support.environments import digest, install

HERE = Path(__file__).parent
FIXTURES = ROOT / "tests" / "server" / "fixtures" / "clients"
AGENTS = ("codex", "claude_code", "opencode", "qwen_code")  # their prompts need a long context
TITLES = {
    "openai_py": "openai (Python)",
    "openai_node": "openai (Node)",
    "anthropic_py": "anthropic (Python)",
    "openai_agents": "openai-agents",
    "vercel_ai": "Vercel AI SDK",
    "langchain": "LangChain",
    "llamaindex": "LlamaIndex",
    "pydantic_ai": "pydantic-ai",
    "instructor": "instructor",
    "litellm": "litellm",
    "guidellm": "guidellm",
    "aiperf": "aiperf",
    "lm_eval": "lm-eval",
    "codex": "Codex",
    "claude_code": "Claude Code",
    "opencode": "opencode",
    "qwen_code": "Qwen Code",
}
FEATURES = (
    *("answer", "stream", "tools", "tools, streamed", "format", "format and tools", "reasoning", "constraint", "adapter"),
    *("state", "tokens", "one turn"),
)
MODEL = ROOT / "models" / "tiny-hybrid"
ADAPTER = "tiny-adapter"
CONTEXT, LAYERS = 131_072, 2  # of the agents' model
CLIENT_SECONDS = 1200
CONNECTIONS = ("--max-num-seqs", "16", "--idle-timeout", "300")

Row = dict[str, Any]  # api, feature, ok, detail


# --- servers --------------------------------------------------------------------------------------------------------------


def long_model(folder: Path) -> Path:
    """The first layers of an embedded model, with room for an agent's prompt."""
    source = ROOT / "models" / "tiny-standard"
    model = folder / "tiny-long"
    model.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, model)
    config = json.loads((source / "config.json").read_text())
    config |= {"max_position_embeddings": CONTEXT, "num_hidden_layers": LAYERS}
    (model / "config.json").write_text(json.dumps(config))
    layer = "model.layers."
    tensors = load_file(source / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not name.startswith(layer) or int(name.split(".")[2]) < LAYERS}
    save_file(kept, model / "model.safetensors")
    return model


# --- clients --------------------------------------------------------------------------------------------------------------


def attempt(name: str, folder: Path, model: Path, **environ: str) -> list[Row]:
    """Run a client's script. A script that prints nothing, fails, or takes too long, is a row that says so."""
    if (HERE / name / "client.mjs").exists():
        for file in (HERE / "features.mjs", HERE / name / "client.mjs"):
            shutil.copy(file, folder)
        command = ["node", "client.mjs"]
    else:
        python = folder / "venv" / "bin" / "python"
        command = [str(python) if python.exists() else sys.executable, str(HERE / name / "client.py")]
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    environment |= {"MODEL": model.name, "MODEL_DIR": str(model), "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= environ
    with (OUT / "clients" / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            text=True, start_new_session=True,
        )  # fmt: skip
        late = ""
        try:
            output, _ = process.communicate(timeout=CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, late = process.communicate()[0], f"did not end within {CLIENT_SECONDS} s"
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"api"')]
    if late or process.returncode or not rows:
        why = late or f"exit status {process.returncode} after {len(rows)} features; see out/clients/{name}.log"
        rows.append({"api": "", "feature": "answer", "ok": False, "detail": why})
    return rows


def requirements(name: str) -> Path:
    (source,) = (path for path in (HERE / name / "requirements.txt", HERE / name / "package.json") if path.exists())
    return source


def version(name: str) -> str:
    source = requirements(name)
    if source.suffix == ".json":
        pins = json.loads(source.read_text())["dependencies"]
        return ", ".join(f"{package} {pin}" for package, pin in pins.items() if package != "zod")
    return ", ".join(line.replace("==", " ") for line in source.read_text().split())


def table(results: dict[str, Any]) -> str:
    head = ["client", "API", *FEATURES]
    lines, failures = [], []
    for name, result in results.items():
        apis = dict.fromkeys(row["api"] for row in result["rows"])
        for api in apis:
            found: dict[str, bool] = {}
            for row in result["rows"]:
                if row["api"] == api:
                    found[row["feature"]] = found.get(row["feature"], True) and row["ok"]
            cells = ["–" if feature not in found else "yes" if found[feature] else "**no**" for feature in FEATURES]
            lines.append([TITLES[name], api, *cells])
        failures += [f"- {TITLES[name]}, {row['api']}, {row['feature']}: {row['detail']}" for row in failed(result)]
    versions = "; ".join(result["version"] for result in results.values())
    below = ["", f"Versions: {versions}.", *(["", "What failed:", "", *failures] if failures else [])]
    return "\n".join([*table_lines(head, lines), *below]) + "\n"


def failed(result: Row) -> list[Row]:
    return [row for row in result["rows"] if not row["ok"]]


def run_all(names: Sequence[str], again: bool, record: bool) -> None:
    """Run clients and keep the result of each in out/clients, so that a later run goes on where this one ends."""
    served = digest([*ROOT.glob("*.py"), *(ROOT / "server").rglob("*.py"), *(ROOT / "engine").rglob("*.py")])
    kept = OUT / "clients"
    kept.mkdir(parents=True, exist_ok=True)
    due = []
    for name in names:
        state = served + digest(path for path in [*HERE.iterdir(), *(HERE / name).iterdir()] if path.is_file())
        file = kept / f"{name}.json"
        if again or record or not file.exists() or json.loads(file.read_text())["state"] != state:
            due.append((name, file, state))
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(due), unit="client") as bar:
        for agents in (False, True):
            mine = [one for one in due if (one[0] in AGENTS) == agents]
            if not mine:
                continue
            model = long_model(Path(folder)) if agents else MODEL
            log = kept / f"server-{model.name}.log"
            lora = [] if agents else ["--lora", f"{ADAPTER}={write_adapter(Path(folder) / ADAPTER, MODEL, PARTS, size=8.0)}"]
            flags = ["--model", str(model), *lora, *CONNECTIONS]
            with rung_server(1, flags, log) as server, thinking_server(Path(folder)) as thinking:
                for name, file, state in mine:
                    bar.set_description(name)
                    environment = install("clients", name, requirements(name))
                    with recording(server.url, thinking) as (urls, taken):
                        rows = attempt(name, environment, model, BASE_URL=urls[0], THINKING_URL=urls[1], ADAPTER=ADAPTER)
                    write_text(file, json.dumps({"state": state, "version": version(name), "rows": rows}, indent=1) + "\n")
                    keep(name, taken, record)
                    bar.update()
                    if wrong := [row["feature"] for row in rows if not row["ok"]]:
                        bar.write(f"{name}: {len(rows) - len(wrong)} of {len(rows)} work", file=sys.stderr)


def keep(name: str, taken: list[Request], record: bool) -> None:
    """Write what a client sent to out/clients, and its shapes to the tests' fixtures."""
    write_text(OUT / "clients" / f"{name}.requests.json", json.dumps(taken, indent=1) + "\n")
    if record and (shapes := fixture(taken)):
        write_text(FIXTURES / f"{name}.json", json.dumps(shapes, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TITLES, metavar="NAME", help=f"only these, again: {', '.join(TITLES)}")
    parser.add_argument("--again", action="store_true", help="run all again, also those whose result is kept in out/clients")
    parser.add_argument("--record", action="store_true", help="write the requests that were served to tests/server/fixtures")
    add_write_option(parser)
    args = parser.parse_args()
    folder = results_folder(args)
    if not shutil.which("npm"):
        raise UserError("npm is missing; install Node 20 or newer")
    run_all(args.only or list(TITLES), args.again or bool(args.only), args.record)
    files = {name: OUT / "clients" / f"{name}.json" for name in TITLES}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    shown = {name: {"version": result["version"], "rows": result["rows"]} for name, result in results.items()}
    write_table("clients", shown, table(results), folder)
    for name, result in results.items():
        for row in failed(result):
            note(f"{name}, {row['api']}, {row['feature']}: {row['detail']}")
    number = sum(len(failed(result)) for result in results.values())
    if number:
        raise UserError(f"{number} features failed; see out/clients/NAME.log and NAME.requests.json")


if __name__ == "__main__":
    run(main)

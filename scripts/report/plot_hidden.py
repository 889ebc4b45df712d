"""Profile the embedded standard and ladder models on 2 CPU ranks, and draw which all-reduces overlap with a module.

    python -m scripts.report.plot_hidden

Runs generate.py --profile on each, takes the prefill from rank 0's trace, and computes the exposed time: the part of the
all-reduces' time during which no module computes. Writes overlap.json and overlap.svg into out, or with --write into
docs/results.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from cli import Parser, run
from errors import UserError
from figures import BLUE, GREEN, VERMILION
from processes import on_ranks
from scripts.lib.machine import describe, machine
from scripts.lib.results import ROOT, add_write_option, made, results_folder, write_json

Span = tuple[float, float]  # begin and end, ms
LAYERS_SHOWN = 3


def trace(model: str, ranks: int, prompt_length: int) -> list[dict[str, Any]]:
    """The events of rank 0's trace of a prefill and one decode step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        command = [*on_ranks(ranks), "generate.py"]
        command += ["--model", f"models/{model}", "--device", "cpu", "--prompt-length", str(prompt_length)]
        command += ["--max-new-tokens", "2", "--ignore-eos", "--profile", str(path), "--json", "--num-samples", "1"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode:
            raise UserError(f"profiling {model} failed:\n{result.stderr[-2000:]}")
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        return [e for e in events if e.get("ph") == "X"]


def prefill_spans(events: list[dict[str, Any]]) -> tuple[list[Span], list[tuple[str, Span]]]:
    """The modules' all-reduces and the modules of the first forward pass. Time 0 is the start of the first module."""
    modules = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["name"].startswith("layer "))
    modules = modules[: len(modules) // 2]  # the other half is the decode step
    origin, end = modules[0][0], modules[-1][1]
    all_reduces = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "gloo:all_reduce")
    ms = [((a - origin) / 1e3, (b - origin) / 1e3) for a, b in all_reduces if origin < a <= end + 1000]
    return ms[: len(modules)], [(name, ((a - origin) / 1e3, (b - origin) / 1e3)) for a, b, name in modules]


def exposed(all_reduces: list[Span], modules: list[tuple[str, Span]]) -> float:
    """ms of the all-reduces' time during which no module computes."""
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in all_reduces for _, (c, d) in modules)
    return sum(b - a for a, b in all_reduces) - hidden


def draw(axis: Any, title: str, all_reduces: list[Span], modules: list[tuple[str, Span]]) -> None:
    """Draw LAYERS_SHOWN layers after the first. The first one is left out, because first calls dominate its time."""
    shown = slice(2, 2 + 2 * LAYERS_SHOWN)
    origin = modules[shown][0][1][0]
    for i, (name, (a, b)) in enumerate(modules[shown]):
        axis.broken_barh([(a - origin, b - a)], (1.1, 0.8), color=BLUE if "attention" in name else GREEN)
        axis.text((a + b) / 2 - origin, 1.5, f"h{i + 3}", ha="center", va="center", color="white", fontsize=9)
    for i, (a, b) in enumerate(all_reduces[shown]):
        axis.broken_barh([(a - origin, b - a)], (0.1, 0.8), color=VERMILION)
        axis.text((a + b) / 2 - origin, 0.02, f"AR{i + 3}", ha="center", va="top", fontsize=7)
    axis.set_ylim(-0.35, 2)
    axis.set_yticks([0.5, 1.5], ["all-reduce", "compute"])
    axis.set_title(title, loc="left", fontsize=10)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks (default: 2)")
    parser.add_argument("--prompt-length", type=int, default=512, help="tokens of the profiled prefill (default: 512)")
    add_write_option(parser)
    args = parser.parse_args()
    folder = results_folder(args)
    figure, axes = plt.subplots(2, 1, figsize=(9, 4), sharex=True, layout="constrained")
    rows = []
    for axis, model in zip(axes, ("tiny-standard", "tiny-ladder"), strict=True):
        all_reduces, modules = prefill_spans(trace(model, args.ranks, args.prompt_length))
        total, open_ms = sum(b - a for a, b in all_reduces), exposed(all_reduces, modules)
        rows.append({"model": model, "sums": len(all_reduces), "all_reduce_ms": total, "exposed_ms": open_ms})
        title = f"{model}: {open_ms:.1f} of {total:.1f} ms of all-reduce exposed ({open_ms / total:.0%})"
        draw(axis, title, all_reduces, modules)
        print(title)
    axes[-1].set_xlabel(f"ms of a prefill of {args.prompt_length} tokens, layers 1 to {LAYERS_SHOWN}, {args.ranks} ranks")
    where = machine()
    settings = {key: value for key, value in vars(args).items() if key != "write"}
    path = write_json("overlap", {"machine": where, "settings": settings, "rows": rows}, folder)
    figure.savefig(folder / "overlap.svg")
    made(folder / "overlap.svg", path)
    print(f"{describe(where, 'cpu')}; wrote {path.relative_to(ROOT)} and overlap.svg")


if __name__ == "__main__":
    run(main)

"""Make tables and plots of GPU measurements from the raw files of the measuring commands.

    make sweep ARGS="--models llama-3-70b --tp 4 --out docs/results/h200-4/sweep-70b.jsonl"       # and others; then
    python -m scripts.report.performance --raw docs/results/h200-4

Reads those of the following files that exist in --raw. Writes a table of each as NAME-{decode,comm,linear,…}.md, and the plot
NAME-comm.png, into out, or with --write into docs/results. NAME is the name of the --raw folder.

    sweep*.jsonl                        make sweep
    profile*.jsonl                      make sweep with --profile; sweep*.jsonl may have it, too
    widths*.jsonl                       make sweep with --quantize and --comms: variants by both widths
    load*.json, startup.json            make throughput, make startup
    clients.json, clients-speculate.json    make throughput with --clients, the latter also with --speculate and --accept-rate
    comm.json, quantized*.json          make bench-comm, the latter with --parts "nccl|quantized"
    linear.json, linear-N.json          make bench-linear
    kernels.json                        make bench-kernels: attention to many keys
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli import Parser, note, run
from comms.quantize import WIDTHS
from errors import UserError
from scripts.bench.serving.load import table as load_table
from scripts.lib.machine import describe
from scripts.lib.markdown import captioned, size_text
from scripts.lib.results import RESULTS, add_write_option, made, results_folder, write_text
from scripts.lib.rows import read_row
from scripts.report import step_profile
from scripts.report.compare import compare, lengths_of
from scripts.sweep.rows import VLLM, Row, Setting, place
from training.metrics import new_figure, plain_log_axis

NCCL = "µs nccl"
ALGORITHMS = {  # names in comm.json: names in tables and plots
    "µs nccl": "NCCL",
    "µs torch one_shot_all_reduce": "torch one-shot",
    "µs torch two_shot_all_reduce_": "torch two-shot",
    "µs one-shot": "one-shot",
    "µs two-shot": "two-shot",
}

QUANTIZED = {
    "µs one-shot": "one-shot",
    "µs two-shot": "two-shot",
    **{f"µs quantized {width}": width for width in WIDTHS},
    **{f"µs portable quantized {width}": f"{width}, over NCCL" for width in WIDTHS},
}
LINEAR = ("linear.json", "linear-[0-9]*.json")


def decode(folder: Path) -> str | None:
    """A table of ms per decode step and per prefill, one column per variant. None if there are no rows."""
    rows = step_profile.swept(folder, "sweep*.jsonl")
    if not rows:
        return None
    variants = sorted({row.setting.variant for row in rows}, key=place)
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in (row for row in rows if row.setting.variant != VLLM):
        cells.setdefault((*_lengths(row.setting), row.communicator, row.setting.interconnect), {})[row.setting.variant] = row
    for row in (row for row in rows if row.setting.variant == VLLM):  # once for each communicator of Rung
        for where in [where for where in cells if (where[:4], where[-1]) == (_lengths(row.setting), row.setting.interconnect)]:
            cells[where][VLLM] = row
    lines = [
        [
            *where,
            str(min(row.setting.runs for row in by.values())),
            what,
            *(_ms(by.get(variant), figure) for variant in variants),
        ]
        for where, by in cells.items()
        for what, figure in (("decode", "decode_ms_per_token"), ("prefill", "prefill_ms"))
    ]
    made = describe(rows[0].machine, "cuda")
    caption = f"ms of a decode step and of the prefill, medians of so many runs; 1 is a single run. Made on {made}."
    return captioned(["model", "tp", "batch", "tokens", "all-reduce", "interconnect", "runs", "", *variants], lines, caption)


def _lengths(s: Setting) -> tuple[str, ...]:
    return s.model_and_widths, str(s.tp), str(s.batch), f"{s.prompt_length} + {s.new_tokens}"


def _ms(row: Row | None, figure: str) -> str:
    value = None if row is None else row.median(figure)
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def widths(folder: Path) -> str | None:
    """A table of variants by the widths of weights and of all-reduces, with each variant's gain over standard."""
    rows = step_profile.swept(folder, "widths*.jsonl")
    if not rows:
        return None
    variants = sorted({row.setting.variant for row in rows}, key=place)
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        s = row.setting
        where = s.model, str(s.tp), s.interconnect, str(s.batch), s.quantize or s.dtype, row.communicator
        cells.setdefault(where, {})[s.variant] = row
    lines = [[*where, *(_gain(by.get(variant), by.get("standard")) for variant in variants)] for where, by in cells.items()]
    lengths = " and ".join(dict.fromkeys(f"{row.setting.prompt_length} + {row.setting.new_tokens}" for row in rows))
    caption = (
        f"ms of a decode step / of the prefill, medians of {min(row.setting.runs for row in rows)} runs or more with {lengths} tokens, "
        f"and how many times as fast as standard in the same line. Made on {describe(rows[0].machine, 'cuda')}."
    )
    return captioned(["model", "tp", "interconnect", "batch", "weights", "all-reduce", *variants], lines, caption)


def _gain(row: Row | None, standard: Row | None) -> str:
    """`9.15 (1.05x) / 65.13 (1.13x)`: decode and prefill, and their ratios to the standard model's."""
    if row is None:
        return ""
    texts = []
    for figure in ("decode_ms_per_token", "prefill_ms"):
        ms, base = row.median(figure), standard and standard.median(figure)
        texts.append(_ms(row, figure) + (f" ({base / ms:.2f}x)" if ms and base and row is not standard else ""))
    return " / ".join(texts)


def comm(found: dict[str, Any]) -> str:
    times = {algorithm: found["found"][name] for name, algorithm in ALGORITHMS.items() if name in found["found"]}
    sizes = sorted({int(size) for by_size in times.values() for size in by_size})
    lines = [[size_text(size), *(f"{t[str(size)]:.1f}" if str(size) in t else "" for t in times.values())] for size in sizes]
    with_norm = found["found"]["µs with norm"]
    shown = ("nccl, then add_rms_norm", "one-shot, then add_rms_norm", "one-shot, fused", "two-shot, then add_rms_norm")
    fused = [f"{name}: {', '.join(f'{us:.1f} ({rows} rows)' for rows, us in with_norm[name].items())}" for name in shown]
    caption = (
        f"µs of an all-reduce of bf16 over {found['ranks']} ranks, medians in CUDA graphs of 20. All-reduce, residual addition and norm of "
        f"rows of 8,192: {'; '.join(fused)}. Made on {found['ranks']} x {found['gpu']}, torch {found['torch']}."
    )
    return captioned(["message", *times], lines, caption)


def quantized(folder: Path) -> str | None:
    """µs by message size and the speedup over NCCL, for every quantized width measured and the exact all-reduces."""
    files = [
        found for path in sorted(folder.glob("quantized*.json")) if (found := read_row(path)) and "µs nccl" in found["found"]
    ]
    tables = []
    for found in sorted(files, key=lambda found: not found.get("p2p", True)):
        times = {name: by_size for name, by_size in found["found"].items() if name in QUANTIZED}
        nccl = found["found"]["µs nccl"]
        sizes = sorted({int(size) for by_size in times.values() for size in by_size} & {int(size) for size in nccl})
        lines = [
            [size_text(size), f"{nccl[str(size)]:.1f}", *(_faster(t, nccl, size) for t in times.values())] for size in sizes
        ]
        where = "" if found.get("p2p", True) else " with NCCL_P2P_DISABLE=1"
        caption = (
            f"µs of a sum of bf16 over {found['ranks']} ranks{where}, and how many times as fast as NCCL's, medians in CUDA graphs of "
            f"20. Made on {found['ranks']} x {found['gpu']}, torch {found['torch']}."
        )
        tables.append(captioned(["message", "NCCL", *(QUANTIZED[name] for name in times)], lines, caption))
    return "\n".join(tables) or None


def _faster(times: dict[str, float], nccl: dict[str, float], size: int) -> str:
    us = times.get(str(size))
    return "" if us is None else f"{us:.1f} ({nccl[str(size)] / us:.2f}x)"


def kind_of(name: str) -> str:
    """The plot panel of one of the names in comm.json."""
    return "exact" if name in ALGORITHMS else "carried by NCCL" if "portable" in name else "quantized"


def byte_axis(axes: Any) -> None:
    """Make the x axis a logarithmic axis of bytes with a tick at every factor of 16."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=16))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))


def plot_comm(files: list[Any], out: Path) -> None:
    """Plot latency by message size. Panels: exact algorithms, quantized algorithms, and quantized algorithms over NCCL.

    Every panel shows NCCL's all-reduce too. There are no error bars because the files hold only medians.
    """
    times = {name: found["found"][name] for found in files for name in (*ALGORITHMS, *QUANTIZED) if name in found["found"]}
    groups = [[name for name in times if kind_of(name) == kind] for kind in ("exact", "quantized", "carried by NCCL")]
    panels = [list(dict.fromkeys([NCCL, *names])) for names in groups if set(names) - {NCCL}]
    if not times:
        return
    figure = new_figure(5, 3.1 * len(panels) + 0.3)
    for axes, names in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
        for name in (name for name in names if name in times):
            points = sorted((int(size), us) for size, us in times[name].items())
            label = ALGORITHMS.get(name) or QUANTIZED[name]
            look = {"linestyle": "--" if "over NCCL" in label else "-", "label": label}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, **look)
        byte_axis(axes)
        plain_log_axis(axes.yaxis)
        axes.set(xlabel="message, bf16", ylabel="µs, median")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, frameon=False)
    figure.suptitle(f"All-reduce over {files[0]['ranks']} x {files[0]['gpu']}", fontsize=10)
    figure.savefig(out, dpi=150)


def linear(folder: Path) -> str | None:
    """A table that compares our best kernel with cuBLAS, for the shapes of Llama-70B, and of 8B on one GPU."""
    files = [read_row(path) for pattern in LINEAR for path in sorted(folder.glob(pattern))]
    cases: dict[tuple[str, int, int, int], dict[bool, float]] = {}
    for entry in (entry for file in files if file for entry in file["times"]):
        shape = entry["shape"].removeprefix("llama-")
        if shape.startswith(("70b", "8b-tp1")):
            key = shape, entry["n"], entry["k"], entry["rows"]
            best = cases.setdefault(key, {})
            own = entry["config"] is not None
            best[own] = min(best.get(own, float("inf")), entry["us"])
    if not cases or files[0] is None:
        return None
    lines = [
        [name, f"{n} x {k}", str(rows), *(f"{us:.1f} | {2 * n * k / us / 1e6:.2f}" for us in (best[False], best[True]))]
        for (name, n, k, rows), best in sorted(cases.items())
        if len(best) == 2
    ]
    head = ["layer", "weight", "rows", "cuBLAS, µs", "TB/s", "own, µs", "TB/s"]
    caption = (
        f"Chains of layers with weights of their own in CUDA graphs, bf16. Made on {describe(files[0]['machine'], 'cuda')}."
    )
    return captioned(head, lines, caption)


def long_attention(found: dict[str, Any]) -> str | None:
    """A table of attention to many keys beside SDPA on contiguous tensors. Decode has a share of the read ceiling."""
    rows = [row for row in found["rows"] if row.get("share_of_ceiling") or row.get("keys")]
    if not rows:
        return None
    lines = [
        [
            "decode" if row["kernel"] == "paged_decode" else "prompt",
            str(row.get("batch", row.get("spans"))),
            f"{row['heads']}, {row['kv_heads']}",
            f"{row['length'] if 'keys' in row else 1:,}",
            f"{row.get('keys', row['length']):,}",
            f"{row['us']:,.1f}",
            f"{row['peer_us']:,.1f}",
            f"{100 * row['share_of_ceiling']:.0f} % of the read ceiling"
            if "keys" not in row
            else f"{row['tflop_per_second']:.0f} TFLOP/s",
        ]
        for row in rows
    ]
    head = ["", "sequences", "heads, KV heads", "queries", "keys", "µs", "SDPA, µs", "reached"]
    caption = (
        f"bf16, inside CUDA graphs; SDPA reads contiguous tensors. Queries are the last ones. The read ceiling is "
        f"{found['read_bytes_per_second'] / 1e12:.2f} TB/s. Made on {describe(found['machine'], 'cuda')}."
    )
    return captioned(head, lines, caption)


def startup(found: dict[str, Any]) -> str:
    phases = list(found["runs"][0]["phases"])
    lines = [
        [run_["cache"], *(f"{run_['phases'].get(phase, 0):.1f}" for phase in phases), f"{run_['first_token']:.1f}"]
        for run_ in found["runs"]
    ]
    s = found["settings"]
    caption = f"Seconds; {s['model']} with random weights on {s['ranks']} ranks. Made on {describe(found['machine'], 'cuda')}."
    return captioned(["kernel cache", *phases, "command to first token"], lines, caption)


def load(folder: Path) -> str | None:
    tables = []
    for found in (found for path in sorted(folder.glob("load*.json")) if (found := read_row(path)) and found.get("rates")):
        s = found["settings"]
        variant = f", {s['variant']}" if s.get("variant") else ""
        step = f", steps of at most {s['max_batch_tokens']} tokens" if s.get("max_batch_tokens") else ""
        whose = "vLLM's" if s.get("server") == "vLLM" else "the"
        server = f"{s['model']}{variant} through {whose} HTTP server on {s['ranks']} ranks" if s["model"] else s["url"]
        caption = f"{server}, Poisson arrivals of {lengths_of(s)} tokens{step}. Made on {describe(found['machine'], 'cuda')}."
        tables.append(f"{load_table(found)}\n\n{caption}\n")
    return "\n".join(tables) or None


CLIENTS = "clients.json", "clients-speculate.json"  # without drafts, and with them


def clients(folder: Path) -> str | None:
    """Closed loops of clients, without drafts and with them."""
    plain, drafted = (read_row(folder / name) for name in CLIENTS)
    if plain is None or drafted is None:
        return None
    head = ["clients", "tokens/s without drafts", "with", "times as fast", "accepted of a draft"]
    head += ["end to end, ms: p50 without drafts", "with"]
    rows = []
    for a, b in zip(plain["clients"], drafted["clients"], strict=True):
        without, with_ = (one["summary"]["tokens_per_second"] for one in (a, b))
        accepted = f"{b['accepted'] / b['drafts']:.2f}" if b["drafts"] else "–"
        ends = (f"{one['summary']['end_to_end_ms']['p50']:,.0f}" for one in (a, b))
        rows.append([str(a["clients"]), f"{without:,.1f}", f"{with_:,.1f}", f"{with_ / without:.2f}", accepted, *ends])
    s, machine = drafted["settings"], drafted["machine"]
    caption = (
        f"{s['model']} through the HTTP server on {s['ranks']} ranks, each client sends {s['requests']} requests of {lengths_of(s)} tokens, "
        f"the next when the last has ended. Drafts by an EAGLE-3 head with random weights, at the cost of a real one; a drafted token counts as "
        f"right with probability {s['accept_rate']:g}. Made on {describe(machine, 'cuda')}."
    )
    return captioned(head, rows, caption)


Table = tuple[Callable[[Path], str | None], str]  # what makes it from a folder, None without raw files; their glob patterns


def of(make: Callable[[dict[str, Any]], str | None], file: str, *more: str) -> Table:
    """A table of the content of one file. more: the patterns of the other raw files that it is made from."""
    return lambda folder: None if (found := read_row(folder / file)) is None else make(found), " ".join((file, *more))


TABLES: dict[str, Table] = {
    "decode": (decode, "sweep*.jsonl"),
    "profile": (step_profile.table, step_profile.FILES),
    "widths": (widths, "widths*.jsonl"),
    "comm": of(comm, "comm.json", "quantized.json"),
    "linear": (linear, " ".join(LINEAR)),
    "long-attention": of(long_attention, "kernels.json"),
    "startup": of(startup, "startup.json"),
    "load": (load, "load*.json"),
    "clients": (clients, " ".join(CLIENTS)),
    "compare": (compare, "sweep*.jsonl load*.json"),
    "quantized": (quantized, "quantized*.json"),
}


PLOTTED = "comm.json quantized.json"


def show(raw: Path, folder: Path) -> None:
    """Write all tables and figures of the raw files in `raw` into `folder`, and record their sources with `made`."""
    for name, (table, files) in TABLES.items():
        text = table(raw)
        if text is not None:
            write_text(path := folder / f"{raw.name}-{name}.md", text)
            _made(path, raw, files)
    plot_comm([found for name in PLOTTED.split() if (found := read_row(raw / name))], path := folder / f"{raw.name}-comm.png")
    _made(path, raw, PLOTTED)


def _made(path: Path, raw: Path, files: str) -> None:
    """Call `made` for a table or figure of `show`, if it was written. files: glob patterns of the raw files that it is made from."""
    if path.exists():
        note(f"wrote {path}")
        if raw.parent == RESULTS:
            made(path, *(file for pattern in files.split() for file in sorted(raw.glob(pattern))))


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--raw",
        type=Path,
        default=RESULTS / "h200-4",
        metavar="DIR",
        help="folder of the raw files (default: docs/results/h200-4)",
    )
    add_write_option(parser)
    args = parser.parse_args()
    if not args.raw.is_dir():
        raise UserError(f"--raw {args.raw}: there is no such folder; let the measuring commands write into it (--out)")
    show(args.raw.resolve(), results_folder(args))


if __name__ == "__main__":
    run(main)

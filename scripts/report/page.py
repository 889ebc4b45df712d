"""Make one HTML page of all measurements: a sweep, its plots, a comparison with the paper's tables, and the server under load.

    python -m scripts.report.page --sweep out/sweep.jsonl --load out/load.json --out out/report.html

The page contains its plots and styles and needs no network. If the file of --sweep or of --load is missing, that part is left
out.
"""

import datetime
import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cli import Parser, note, run
from errors import UserError
from scripts.bench.serving.load import table as load_table
from scripts.lib.markdown import table_lines
from scripts.lib.results import ROOT, check_output, write_text
from scripts.report import paper_tables
from scripts.report.plots import FIGURES
from scripts.sweep import tables
from scripts.sweep.rows import Row, add_sweep_option, column, finished, ratio, read_rows

STYLE = """
:root { color-scheme: light; --line: #e5e7eb; --soft: #6b7280; --accent: #2563eb; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.55 system-ui, sans-serif; color: #111827; background: #f9fafb; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 4px; letter-spacing: -0.02em; }
h2 { font-size: 19px; margin: 0 0 12px; }
p { margin: 0 0 12px; } .soft, figcaption { color: var(--soft); font-size: 13px; }
section { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 24px; margin-top: 20px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 12px; margin-top: 20px; }
.fact { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px; }
.fact b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin-bottom: 20px; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 8px; border-bottom: 1px solid var(--line); text-align: left; overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; overflow-wrap: normal; }
.number { text-align: right; } tbody tr:hover { background: #f3f4f6; }
.plots { display: flex; flex-wrap: wrap; gap: 24px; align-items: flex-start; }
details { margin-bottom: 20px; } summary { cursor: pointer; color: var(--soft); font-size: 13px; margin-bottom: 8px; }
figure { margin: 0 0 24px; max-width: 500px; } figure svg { max-width: 100%; height: auto; }
code { font-size: 13px; }
"""

CAPTIONS = {
    "throughput": "Generated tokens a second, prefill included, relative to the standard model (figure 2 of the paper).",
    "bars": "The same at the most ranks (figure 3 of the paper); whiskers reach to the slowest and the fastest run. The upper bound sends nothing, and its text is wrong; where it lies beyond the axis, its figure is written there.",
    "pareto": "Time to complete a batch against tokens a second and rank; lines join what no other point beats (figure 4).",
    "split": "A decode step, and the measured ones' median and quartiles. Communication is hidden while something computes, and exposed while nothing does.",
}


# --- pieces of HTML ------------------------------------------------------------------------------------------------------


def html_table(markdown: str) -> str:
    """A Markdown table as HTML; columns of figures are right-aligned."""
    lines = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in markdown.splitlines() if line.startswith("|")]
    head, body = lines[0], lines[2:]
    numeric = [all(is_figure(cells[i]) for cells in body) for i in range(len(head))]

    def row(cells: list[str], tag: str) -> str:
        kinds = [" class=number" if number else "" for number in numeric]
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    rows = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in body)
    return f'<div class="scroll"><table><thead><tr>{row(head, "th")}</tr></thead><tbody>{rows}</tbody></table></div>'


def is_figure(cell: str) -> bool:
    """Whether a cell holds a number, several numbers separated by /, or the text for a missing number."""
    return cell in ("", "not run") or re.fullmatch(r"-?[\d.,]+( / [\d.,]+)*( \([\d.]+ to [\d.]+\))?", cell) is not None


def svg(figure: Figure, name: str) -> str:
    """A figure as an inline SVG. Its ids get a prefix, because all figures of a page share one namespace."""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    plt.close(figure)
    text = out.getvalue()[out.getvalue().index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    return text.replace("url(#", f"url(#{name}-")


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{html.escape(text)}</p>"


# --- the parts of the page -----------------------------------------------------------------------------------------------


def facts(rows: Sequence[Row]) -> str:
    """The number of configurations, the best gain and the shortest decode step, in large type."""
    done = finished(rows)
    gains = [
        (gain, r)
        for r in done
        if r.setting.variant not in ("standard", "upper-bound") and (gain := ratio(r, done, "throughput"))
    ]
    steps = [(ms, r) for r in done if r.setting.variant != "upper-bound" and (ms := r.median("decode_ms_per_token"))]
    shown = [(f"{len(done)}", f"configurations measured, {len(rows) - len(done)} failed")]
    if gains:
        gain, row = max(gains, key=lambda pair: pair[0])
        shown.append((f"{gain:.2f}×", f"standard's tokens/s: {row.setting.label}"))
    if steps:
        ms, row = min(steps, key=lambda pair: pair[0])
        shown.append((f"{ms:.2f} ms", f"shortest decode step: {row.setting.label}"))
    return (
        '<div class="facts">'
        + "".join(f'<div class="fact"><b>{b}</b>{paragraph(text, "soft")}</div>' for b, text in shown)
        + "</div>"
    )


def latency(rows: Sequence[Row]) -> str:
    text = tables.latency_table(rows)
    about = "ms of a decode step at batch 1: the median of the runs' median steps, in brackets the lowest and the highest run."
    return section("Latency", paragraph(about, "soft"), html_table(text)) if text else ""


def plots(rows: Sequence[Row]) -> str:
    parts = []
    for name, draw in FIGURES.items():
        if (figure := draw(rows)) is not None:
            parts.append(f"<figure>{svg(figure, name)}<figcaption>{html.escape(CAPTIONS[name])}</figcaption></figure>")
    return section("Plots", f'<div class="plots">{"".join(parts)}</div>') if parts else ""


def everything(rows: Sequence[Row]) -> str:
    about = (
        f"Medians of {', '.join(map(str, column(rows, 'runs')))} runs behind one that warms up. tokens/s counts generated tokens "
        "over prefill and decode together; weights and memory are a rank's."
    )
    parts = [paragraph(about, "soft"), html_table(tables.table(rows))] if finished(rows) else []
    failed = [(r.setting.label, r.error.replace("|", "/")) for r in rows if r.error]
    if failed:
        table = "\n".join(table_lines(["configuration", "error"], failed))
        parts += ["<h2 style='margin-top:24px'>Failed</h2>", html_table(table)]
    return section("All configurations", *parts)


def paper(rows: Sequence[Row]) -> str:
    parts = [
        folded(block) if block.startswith("|") else paragraph(block)
        for block in paper_tables.markdown(rows).strip().split("\n\n")
    ]
    return section("Beside the paper", *parts)


def folded(markdown: str) -> str:
    """A table as HTML. Rows that were not run here are collapsed."""
    head, rule, *lines = markdown.splitlines()
    absent = [line for line in lines if "not run" in line]
    ran = [line for line in lines if line not in absent]
    shown = html_table("\n".join([head, rule, *ran])) if ran else ""
    if not absent:
        return shown
    hidden = html_table("\n".join([head, rule, *absent]))
    return f"{shown}<details><summary>{len(absent)} of {len(lines)} rows not run here</summary>{hidden}</details>"


def load(result: dict[str, Any]) -> str:
    """The section on the server under load. Cells with three figures hold p50, p90 and p99."""
    s, text = result["settings"], load_table(result)
    kind = "requests of each client, one after the other" if "clients" in result else "requests a rate, Poisson arrivals"
    about = f"{s['model'] or s['url']}, {s['ranks']} rank(s), {s['requests']} {kind}. Cells of three: p50 / p90 / p99."
    parts = [paragraph(about, "soft"), html_table(text)]
    parts += [paragraph(line) for line in text.splitlines() if line and not line.startswith("|")]
    if "offline" in result:
        o = result["offline"]
        parts.append(
            paragraph(
                f"All requests at once and without HTTP: {o['generated_tokens_per_second']:,.1f} generated tokens/s, "
                f"median step {o['median_step_ms']:.2f} ms, {o['requests']} requests of {o['prompt_length']} + {o['new_tokens']} tokens."
            )
        )
    return section("The server under load", *parts)


def machine(about: dict[str, Any], versions: dict[str, str]) -> str:
    return section("Machine and versions", html_table("\n".join(table_lines(["what", "value"], (about | versions).items()))))


def page(rows: Sequence[Row], loaded: dict[str, Any] | None, title: str) -> str:
    """The whole page."""
    parts = []
    if rows:
        parts = [facts(rows), latency(rows), plots(rows), everything(rows), paper(rows)]
    if loaded:
        parts.append(load(loaded))
    about = rows[-1].machine if rows else (loaded or {}).get("machine", {})
    parts.append(machine(about, rows[-1].versions if rows else {}))
    day = datetime.date.today().isoformat()
    where = f"{about.get('gpus') if about.get('gpus') != 'none' else about.get('cpu')}, torch {about.get('torch')}; {day}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main><h1>{html.escape(title)}</h1>"
        f"{paragraph(where, 'soft')}{''.join(parts)}</main></body></html>\n"
    )


def read_load(path: Path) -> dict[str, Any] | None:
    """Read the result of `make throughput`. None if there is no such file. Raises UserError."""
    if not path.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        load_table(result)
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is no result of make throughput ({e!r}); run it again") from None
    return result


def main() -> None:
    parser = Parser(description=__doc__)
    add_sweep_option(parser)
    parser.add_argument(
        "--load", type=Path, default=ROOT / "out" / "load.json", help="result of make throughput (default: out/load.json)"
    )
    parser.add_argument("--title", default="Rung: measured", help="title of the page")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "report.html", help="HTML file to write (default: out/report.html)"
    )
    args = parser.parse_args()
    rows = read_rows(args.sweep) if args.sweep.exists() else []
    loaded = read_load(args.load)
    if not rows and loaded is None:
        raise UserError(f"neither {args.sweep} nor {args.load} exists; run make sweep or make throughput first")
    check_output(args.out)
    write_text(args.out, page(rows, loaded, args.title))
    note(f"wrote {args.out}")


if __name__ == "__main__":
    run(main)

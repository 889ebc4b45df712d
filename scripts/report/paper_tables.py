"""Compare tables 1, 2 and 6 of the ladder paper with a sweep on this machine.

    python -m scripts.report.paper_tables --sweep out/sweep.jsonl
    python -m scripts.report.paper_tables --sweep out/sweep.jsonl --tp 4 --new-tokens 64     # our rows with fewer GPUs or shorter runs

The paper's figures are in paper_tables.json. Our figures are those of GPU rows with exactly the paper's model, batch,
ranks and lengths, except that --tp and --new-tokens replace the paper's values. Configurations without a row are marked as not
run. The paper's "No NVLink" corresponds to our interconnect no-p2p. `make sweep ARGS="--grid table-2"` runs the rows of a table.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli import Parser, note, run
from scripts.lib.machine import describe
from scripts.lib.markdown import table_lines
from scripts.lib.results import write_text
from scripts.sweep.rows import Row, add_sweep_option, finished, ratio, read_rows

PAPER = Path(__file__).with_name("paper_tables.json")
TITLES = {
    "throughput_ratio": "tokens/s over standard",
    "prefill_percent": "prefill, %",
    "decode_percent": "decode, %",
    "throughput_percent": "tokens/s, %",
}
LINKS = {"nvlink": "NVLink", "no-nvlink": "no NVLink"}


def figure(row: Row, rows: Sequence[Row], name: str) -> float | None:
    """A figure as the paper defines it, relative to the standard model: lower latency in %, or the ratio or gain in % of
    tokens a second."""
    if name == "prefill_percent" or name == "decode_percent":
        latency = ratio(row, rows, "prefill_ms" if name == "prefill_percent" else "decode_ms_per_token")
        return None if latency is None else (1 - latency) * 100
    throughput = ratio(row, rows, "throughput")
    if throughput is None or name == "throughput_ratio":
        return throughput
    return (throughput - 1) * 100


def matching(rows: Sequence[Row], table: dict[str, Any], entry: dict[str, Any], link: str, ours: dict[str, int]) -> list[Row]:
    """Our rows with the configuration of one of the paper's rows, with the settings in `ours` replaced. There can be several, with
    different communicators, dtypes or compilation."""
    wanted = table["setup"] | {name: entry[name] for name in ("model", "variant", "tp") if name in entry}
    wanted |= {"interconnect": link} | ours
    return [row for row in rows if all(getattr(row.setting, name) == value for name, value in wanted.items())]


def kind(row: Row) -> str:
    """The settings in which our rows of one configuration can differ, as text."""
    return f"tp {row.setting.tp}, {row.setting.new_tokens} tokens, {row.communicator}, {row.setting.dtype}{', compiled' if row.setting.compile else ''}"


def lines_of(table: dict[str, Any], links: dict[str, str], rows: Sequence[Row], ours: dict[str, int]) -> list[list[str]]:
    """The cells of a table: name, interconnect, settings of our row, then the paper's and our value of every column."""
    lines = []
    for link, name in links.items():
        for entry in table["rows"]:
            found: list[Row | None] = [*matching(rows, table, entry, name, ours)] or [None]
            for row in found:
                cells = [entry["name"], LINKS[link], kind(row) if row else "not run"]
                for column, theirs in zip(table["columns"], entry[link], strict=True):
                    value = figure(row, rows, column) if row else None
                    # without a standard row to compare with, there is no value either
                    cells += [f"{theirs:.2f}", "not run" if value is None else f"{value:.2f}"]
                lines.append(cells)
    return lines


def markdown(rows: Sequence[Row], **ours: int) -> str:
    """All three tables and a caption. ours: settings (`tp`, `new_tokens`) of our rows that replace those of the paper."""
    paper, done = json.loads(PAPER.read_text()), [row for row in finished(rows) if row.setting.device == "cuda"]
    parts = []
    for table in paper["tables"]:
        columns = [f"{TITLES[name]}: {whose}" for name in table["columns"] for whose in ("paper", "ours")]
        head = ["", "interconnect", "ours", *columns]
        lines = table_lines(head, lines_of(table, paper["interconnects"], done, ours))
        parts.append("\n".join([f"Table {table['table']}: {table['what']}", "", *lines, ""]))
    made = f" Ours on {describe(done[0].machine, 'cuda')}." if done else ""
    return "\n".join([*parts, f"Paper: {paper['source']}, on H100.{made}", ""])


def main() -> None:
    parser = Parser(description=__doc__)
    add_sweep_option(parser)
    parser.add_argument("--tp", type=int, metavar="N", help="show our rows with N ranks (default: 8, as the paper)")
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="show our rows with N generated tokens (default: 512, as the paper)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown to this file")
    args = parser.parse_args()
    ours = {name: value for name in ("tp", "new_tokens") if (value := getattr(args, name)) is not None}
    text = markdown(read_rows(args.sweep), **ours)
    print(text)
    if args.out:
        write_text(args.out, text)
        note(f"wrote {args.out}")


if __name__ == "__main__":
    run(main)

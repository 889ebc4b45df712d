"""A table of Rung beside vLLM, from the raw files of `make compare`: times, and how many times as fast Rung is.

Rows and loads are compared if their models, ranks and lengths are equal. A sweep's rows are compared if they were measured
without a choice of communicator, interconnect or seed, loads if without one of the most tokens in a step. Rows of long answers are
all requests at once, by `LLM` and vLLM's; where Rung has no such row, those of its server's engine take its place.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.lib.machine import describe
from scripts.lib.markdown import captioned
from scripts.sweep.rows import VLLM, finished, place, read_rows, with_widths

PERCENTILE = "p50"
AT_ONCE = 256  # generated tokens from which a sweep's row is all requests at once; shorter ones measure steps


class Case(NamedTuple):
    """What is measured. The table is in the order of these fields."""

    model: str
    ranks: int
    quantity: int  # index in QUANTITIES
    tokens: str  # prompt + generated
    size: float  # sequences, or requests/s


class Quantity(NamedTuple):
    name: str  # with {size}
    more_is_better: bool = False


QUANTITIES = (
    Quantity("decode, ms a step of {size}"),
    Quantity("prefill, ms of {size}"),
    Quantity("{size} requests at once, tokens/s", more_is_better=True),
    Quantity(f"time to first token at {{size}} requests/s, ms ({PERCENTILE})"),
    Quantity(f"time between tokens at {{size}} requests/s, ms ({PERCENTILE})"),
    Quantity("GPU's wait for the host at {size} requests/s, % of a step"),  # vLLM does not report it
)
DECODE, PREFILL, OFFLINE, TTFT, ITL, IDLE = range(len(QUANTITIES))

Figures = dict[Case, dict[str, float]]  # by variant or VLLM


def compare(folder: Path) -> str | None:
    """The Markdown table of the raw files in `folder`. None if nothing was measured of both vLLM and Rung."""
    figures: Figures = {}
    machines: dict[str, None] = {}
    for case, whose, value, machine in (*_sweeps(folder), *_loads(folder)):
        by = figures.setdefault(case, {})
        if case.quantity != OFFLINE or whose not in by:
            by[whose] = value
        machines[machine] = None
    both = {case for case, by in figures.items() if VLLM in by and len(by) > 1}
    both |= {case._replace(quantity=IDLE) for case in both if case.quantity == TTFT}
    figures = {case: by for case, by in sorted(figures.items()) if case in both}
    if not figures:
        return None
    variants = sorted({name for by in figures.values() for name in by} - {VLLM}, key=place)
    head = ["model", "ranks", "tokens", "what", "vLLM", *(part for v in variants for part in (v, "times as fast"))]
    lines = []
    for case, by in figures.items():
        quantity = QUANTITIES[case.quantity]
        cells = [case.model, str(case.ranks), case.tokens, quantity.name.format(size=f"{case.size:g}")]
        cells.append(_number(by[VLLM]) if VLLM in by else "")
        for variant in variants:
            ratio = f"{_ratio(quantity, by, variant):.2f}" if VLLM in by and variant in by else "–"
            cells += [_number(by[variant]) if variant in by else "–", ratio]
        lines.append(cells)
    return captioned(head, lines, f"Medians. Made on {'; '.join(machines)}.")


def _ratio(quantity: Quantity, by: dict[str, float], variant: str) -> float:
    return by[variant] / by[VLLM] if quantity.more_is_better else by[VLLM] / by[variant]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


Found = tuple[Case, str, float, str]  # case, variant or VLLM, value, machine


def _sweeps(folder: Path) -> Iterator[Found]:
    for path in sorted(folder.glob("sweep*.jsonl")):
        for row in finished(read_rows(path)):
            s = row.setting
            if s.comm is not None or s.interconnect != "default":
                continue
            lengths = f"{s.prompt_length} + {s.new_tokens}"
            machine = describe(row.machine, s.device)
            steps = ((DECODE, "decode_ms_per_token"), (PREFILL, "prefill_ms"))
            for quantity, figure in ((OFFLINE, "throughput"),) if s.new_tokens >= AT_ONCE else steps:
                if (value := row.median(figure)) is not None:
                    yield Case(s.model_and_widths, s.tp, quantity, lengths, s.batch), s.variant, value, machine


def _loads(folder: Path) -> Iterator[Found]:
    for path in sorted(folder.glob("load*.json")):
        found: dict[str, Any] = json.loads(path.read_text())
        s = found["settings"]
        if s.get("max_batch_tokens") is not None or s["model"] is None:  # of --url, whose model is not known
            continue
        model = with_widths(s["model"], s.get("quantize"), s.get("kv_dtype", "auto"))
        whose = VLLM if s.get("server") == "vLLM" else s.get("variant") or "standard"
        lengths = lengths_of(s)
        machine = describe(found["machine"], "cuda")
        offline = found.get("offline")
        if offline:
            case = Case(model, s["ranks"], OFFLINE, lengths, offline["requests"])
            yield case, whose, offline["generated_tokens_per_second"], machine
        for one in found.get("rates") or ():
            for quantity, name in (TTFT, "ttft_ms"), (ITL, "itl_ms"):
                if spread := one["summary"][name]:
                    yield Case(model, s["ranks"], quantity, lengths, one["rate"]), whose, spread[PERCENTILE], machine
            if (share := one.get("gpu_idle_share")) is not None:
                yield Case(model, s["ranks"], IDLE, lengths, one["rate"]), whose, 100 * share, machine


def lengths_of(settings: dict[str, Any]) -> str:
    """The tokens of a load's requests, prompt + generated: each one number, or the least and the greatest."""
    bounds = (settings[name] for name in ("prompt_length", "new_tokens"))
    return " + ".join(str(low) if low == high else f"{low}–{high}" for low, high in bounds)

"""The data of a sweep: a `Setting` is one configuration, a `Row` is one line of the JSON-lines file.

The tables read only these rows.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from comms import parse_link
from config import VARIANTS
from errors import UserError

ORDER = tuple(VARIANTS)
VLLM = "vllm"  # in place of a variant: vLLM was measured instead of Rung


def with_widths(model: str, quantize: str | None, kv_dtype: str) -> str:
    """The model, and in how many bits its weights and KV cache are held unless in the dtype: `llama-3-8b, int4, fp8 cache`."""
    cache = "" if kv_dtype == "auto" else f", {kv_dtype} cache"
    return model + (f", {quantize}" if quantize else "") + cache


@dataclass(frozen=True)
class Setting:
    """One configuration. Two runs with equal settings on one machine measure the same thing."""

    model: str  # a preset or a checkpoint directory
    variant: str  # as `generate.py --variant` takes it, or VLLM
    tp: int  # tensor-parallel ranks
    batch: int  # sequences
    prompt_length: int  # tokens
    new_tokens: int
    comm: str | None = None  # None: the device's default
    interconnect: str = "default"  # see `interconnect`
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    seed: int = 0  # of random weights and prompts
    runs: int = 3  # measured runs, after one warm-up run
    profile: bool = False  # one additional run under the profiler
    overlap: str = "auto"  # how a ladder's all-reduces are computed, as `generate.py --overlap` takes it
    kv_dtype: str = "auto"  # as `generate.py --kv-dtype` takes it
    quantize: str | None = None  # as `generate.py --quantize` takes it
    deterministic: bool = False  # see docs/determinism.md

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def model_and_widths(self) -> str:
        return with_widths(self.model, self.quantize, self.kv_dtype) + (", deterministic" if self.deterministic else "")

    @property
    def label(self) -> str:
        seed = "" if self.seed == 0 else f" seed {self.seed}"
        sums = "" if self.comm is None else f" {self.comm}"
        link = "" if self.interconnect == "default" else f" {self.interconnect}"
        overlap = "" if self.overlap == "auto" else f" {self.overlap}"
        lengths = f"{self.prompt_length}+{self.new_tokens}"
        return f"{self.model_and_widths} {self.variant} tp{self.tp} b{self.batch} {lengths}{sums}{link}{overlap}{seed}"

    def of_variant(self, variant: str) -> "Setting":
        """The same configuration of another variant."""
        return replace(self, variant=variant)


@dataclass(frozen=True)
class Interconnect:
    """The connection between ranks.

    environment: variables for the ranks; link: a link to simulate, as `--simulate-link` takes it; hosts: number of hosts.
    """

    environment: dict[str, str] = field(default_factory=dict)
    link: str | None = None
    hosts: int = 1


def interconnect(text: str) -> Interconnect:
    """Parse one value of `--interconnects`. Raises UserError.

    `default`: the machine as it is; `no-p2p`: GPUs exchange through host memory, the paper's "No NVLink"; `two-hosts`: two
    simulated hosts, see `worker.separate_hosts`; `NAME=VALUE[;NAME=VALUE]`: environment variables; `LATENCY,BANDWIDTH`: a
    simulated link, on CPU.
    """
    if text == "default":
        return Interconnect()
    if text == "no-p2p":
        return Interconnect({"NCCL_P2P_DISABLE": "1"})
    if text == "two-hosts":
        return Interconnect(hosts=2)
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(";")]
        if not all(name.isidentifier() and sign for name, sign, _ in pairs):
            raise UserError(f"interconnect {text!r}: write variables as NAME=VALUE, with ; between them")
        return Interconnect({name: value for name, _, value in pairs})
    if "," not in text:
        raise UserError(
            f"unknown interconnect {text!r}; give default, no-p2p, two-hosts, NAME=VALUE or a link such as 10ms,100MB/s"
        )
    parse_link(text)
    return Interconnect(link=text)


@dataclass(frozen=True)
class Row:
    """The result of one configuration: its raw samples, or the error if there are none."""

    setting: Setting
    machine: dict[str, Any]
    versions: dict[str, str]
    variant: str = ""  # the variant in words
    communicator: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)  # one per measured run, as `worker.one_run` returns it
    # ms of a decode step: compute, hidden, exposed, idle, and the `source`; with a GPU also `gpu`, by phase as `trace.gpu_record`
    split: dict[str, Any] | None = None
    error: str | None = None
    schedules: str = ""  # of a ladder's all-reduces, as `auto` chose them for each kind of step

    def values(self, name: str) -> list[float]:
        """One figure of every run: a field of the samples, or `completion_ms` or `throughput`, which are computed from them."""
        if name == "completion_ms":  # of the whole batch, from prefill to the last token
            return [s["prefill_ms"] + sum(s["step_ms"]) for s in self.samples]
        if name == "throughput":  # generated tokens a second, end to end, as in the paper's tables 1, 2 and 6
            tokens = self.setting.batch * self.setting.new_tokens
            return [tokens / ms * 1e3 for ms in self.values("completion_ms")]
        return [s[name] for s in self.samples if s[name] is not None]

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return median(values) if values else None


def read_rows(path: Path) -> list[Row]:
    """The rows of a sweep's file. If several have equal settings, only the last one is kept. Raises UserError."""
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); run make sweep first, or name its file") from None
    rows: dict[str, Row] = {}
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            row = Row(**{**raw, "setting": Setting(**raw["setting"])})
        except (ValueError, TypeError, KeyError) as e:
            raise UserError(f"{path} line {number} is no row of a sweep ({e}); remove the line or the file") from None
        rows.pop(row.setting.key, None)
        rows[row.setting.key] = row
    return list(rows.values())


def row_line(row: Row) -> str:
    return json.dumps({f.name: getattr(row, f.name) for f in fields(Row)} | {"setting": asdict(row.setting)}) + "\n"


def pooled(rows: Iterable[Row]) -> list[Row]:
    """One row per configuration with the samples of all seeds. The row's setting has seed 0."""
    found: dict[Setting, Row] = {}
    for row in rows:
        setting = replace(row.setting, seed=0)
        same = found.get(setting)
        samples = [*(same.samples if same else []), *row.samples]
        found[setting] = replace(same or row, setting=setting, samples=samples, split=(same and same.split) or row.split)
    return list(found.values())


def place(variant: str) -> tuple[int, str]:
    """A sort key of variants, as `Setting` has them: in the order of `variants.VARIANTS`, then vLLM."""
    name = variant.partition(":")[0]
    return ORDER.index(name) if name in ORDER else len(ORDER), variant


def finished(rows: Iterable[Row]) -> list[Row]:
    """The rows that have samples, with seeds pooled and variants in the order of `place`."""

    def order(row: Row) -> tuple[Any, ...]:
        s = row.setting
        return s.model, s.interconnect, s.comm or "", s.tp, s.batch, s.prompt_length, s.new_tokens, place(s.variant)

    return sorted(pooled(row for row in rows if row.samples), key=order)


def baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """The standard model's row of the same configuration."""
    standard = row.setting.of_variant("standard")
    return next((other for other in rows if other.setting == standard and other.samples), None)


def ratio(row: Row, rows: Sequence[Row], name: str) -> float | None:
    """The median of `name` in `row` divided by that of the standard model. None if either is missing."""
    base = baseline(row, rows)
    above, below = row.median(name), base.median(name) if base else None
    return above / below if above is not None and below else None

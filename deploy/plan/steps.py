"""How long a step of the engine takes: measured rows of sweeps, and a roofline with figures fitted to them between and beyond.

A step of n tokens takes, besides attention,

    ((bytes / read speed)^p + (FLOPs / (share of the peak))^p)^(1/p) + layers * launch + exposed * all-reduces / link speed

The weights' bytes are read once. `launch`, the time that a layer takes beyond its bytes, and `share` are fitted for each GPU
and width to the rows on one GPU; for several ranks a variant adds to `launch`, and leaves some of its all-reduces' time
`exposed`. Attention is added to it: the bytes of the keys and values that a decoding sequence reads, and the FLOPs of a
prompt. If the same layers were measured on as many ranks, the roofline is multiplied by what was measured over what it
predicts, interpolated in the logarithm of the tokens. So a row that was measured is predicted as measured, unless it is the
mean of several steps of a prefill, in which the clock may be lower (`Tables.heat`).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoints.memory import cache_bytes, weight_bytes
from checkpoints.presets import is_preset, model_config, named_config
from comms.cluster import load_cluster
from config import ModelConfig
from engine.runner import LARGEST_GRAPH, decode_buckets, prefill_buckets
from errors import UserError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# bytes/s that a kernel that only reads reaches (docs/kernels.md)
READ = {"h100": 3.11e12, "h200": 4.34e12}
LIKE = {"int8": "int4"}  # widths whose layers work alike, where only the other one was measured
EXPONENT = 1.5  # of the roofline's corner: 1 adds reading and computing, a large one takes the longer
STEP_TOKENS = 1 << 16  # most prompt tokens of a step in sweeps that do not say it
TILE = 128  # rows of a tile of the GEMMs that many rows use, cuBLAS's and ours
LONG = 16384  # tokens of a prefill that is long enough to lower the clock
ATTENTION_SHARE = 0.4  # of the peak, of attention in a prompt: what 64 prompts of 8,160 tokens leave for it on an H200
MIXED_SHARE = (
    0.5  # of the read speed, of decoding sequences' attention in a step with prompts: fitted to the engine's offline runs
)
Figures = tuple[float, float]


@dataclass(frozen=True)
class Gpu:
    """Speeds in bytes/s and FLOP/s (16 bits). `link`: NVLink in one direction, as large all-reduces reach it."""

    name: str
    memory: float
    read: float
    flops: float
    link: float


def gpu(name: str) -> Gpu:
    """Raises UserError for a GPU on which nothing was measured."""
    if name not in READ:
        raise UserError(f"--gpu {name}: no step was measured on it; known: {', '.join(READ)}")
    cluster = load_cluster(name)
    link = cluster.link_gb_per_second * cluster.link_efficiency * 1e9
    return Gpu(name, cluster.memory_gb * 1e9, READ[name], cluster.bfloat16_tflops * 1e12, link)


@dataclass(frozen=True)
class Setup:
    """One group of ranks: a model with its variant and quantization on `tp` GPUs. Bytes and FLOPs are those of a rank."""

    gpu: Gpu
    config: ModelConfig
    tp: int
    width: str  # bf16, or a value of --quantize
    variant: str  # as `--variant` takes it, with its number

    @cached_property
    def weights(self) -> int:
        """Bytes in memory. Raises UserError if the model cannot be split over `tp` ranks."""
        return weight_bytes(self.config, self.tp, torch.bfloat16)

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes that a token takes in the KV cache."""
        return cache_bytes(self.config, self.tp, torch.bfloat16, 1)

    @property
    def table(self) -> int:
        """The number of entries that the embedding has on all ranks together, and the head as well."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def read_bytes(self) -> float:
        """Bytes of the weights that a step reads: all but the rows of the embedding that it does not look up."""
        return self.weights - (0 if self.config.tie_embeddings else 2 * self.table / self.tp)

    def roofline(self, tokens: Any, launch: float, share: float) -> Any:
        """Seconds of a step without attention and all-reduces. tokens: a number, or an array of them."""
        layers = self.config.n_layers * self.config.layer_parameter_count()
        peak = self.gpu.flops * (2 if self.width == "fp8" else 1)
        compute = 2 * layers / self.tp * np.asarray(tokens, float) / (share * peak)
        return (compute**EXPONENT + (self.read_bytes / self.gpu.read) ** EXPONENT) ** (
            1 / EXPONENT
        ) + self.config.n_layers * launch

    def link_seconds(self, tokens: Any) -> Any:
        """Seconds that the link takes for the bytes that a rank sends in a standard model's all-reduces."""
        sent = 2 * self.config.n_layers * 2 * self.config.hidden_size * 2 * (self.tp - 1) / self.tp
        return sent * np.asarray(tokens, float) / self.gpu.link

    @property
    def seconds_per_context(self) -> float:
        """Seconds that a decoding sequence's attention to a token takes."""
        return self.kv_bytes / self.gpu.read

    @property
    def seconds_per_pair(self) -> float:
        """Seconds that a prompt's attention takes for a pair of a token and one before it."""
        config = self.config
        return 4 * config.n_heads * config.head_dim * config.n_layers / self.tp / (ATTENTION_SHARE * self.gpu.flops)

    @property
    def layer(self) -> tuple[object, ...]:
        """What decides how long a layer takes: setups of which it is equal have layers that take equally long."""
        c = self.config
        shape = c.hidden_size, c.n_heads, c.n_kv_heads, c.head_dim, c.intermediate_size, c.vocab_size
        variant = c.variant_name, len(c.ladder_layers) / c.n_layers, c.desync_streams
        return self.gpu.name, self.tp, self.width, variant if self.tp > 1 else "standard", *shape


@dataclass(frozen=True)
class Row:
    """Measured seconds of a step of `tokens` tokens, without attention; the mean of the steps that compute `run` tokens."""

    setup: Setup
    tokens: int
    seconds: float
    run: int


def setup_of(name: str, gpu: Gpu, variant: str | None, tp: int, quantize: str | None) -> Setup:
    """name, variant and quantize: as the server takes them, but a variant that only names the model's own changes nothing.
    Raises UserError."""
    own = named_config(name).variant_name
    config = model_config(name, None if variant == own else variant, tp, quantize)
    scheme = config.quantization.rules[0].scheme if config.quantization else None
    width = f"{'fp' if scheme.is_float else 'int'}{scheme.bits}" if scheme else "bf16"
    return Setup(gpu, config, tp, width, variant or own)


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows of sweeps (`make sweep`) of presets of dense models on the known GPUs, in bf16 or quantized, with the communicator
    that `auto` chose. Raises UserError for a file that cannot be read."""
    found = []
    for file in files:
        try:
            lines = [json.loads(line) for line in file.read_text().splitlines() if line]
        except (OSError, ValueError) as e:
            raise UserError(f"{file} is no file of a sweep ({e}); `make sweep` writes one") from None
        for line in lines:
            if (setting := line.get("setting")) and line["samples"] and _counts(setting):
                kind = next((name for name in READ if name.upper() in line["machine"]["gpus"]), None)
                found += _rows(setting, line["samples"], gpu(kind)) if kind else []
    return found


def _counts(setting: dict[str, Any]) -> bool:
    plain = setting["dtype"] == "bfloat16" and setting.get("kv_dtype", "auto") in (None, "auto")
    usual = setting["comm"] in (None, "auto") and setting["interconnect"] == "default" and not setting.get("deterministic")
    return plain and usual and setting["device"] == "cuda" and setting["variant"] != "vllm" and is_preset(setting["model"])


def _rows(setting: dict[str, Any], samples: Sequence[dict[str, Any]], gpu: Gpu) -> list[Row]:
    """The decode step and a step of the prefill, each the median of the runs."""
    setup = setup_of(setting["model"], gpu, setting["variant"], setting["tp"], setting.get("quantize"))
    if setup.config.experts:  # a step reads those that its tokens have, which no roofline here knows
        return []
    batch, prompt = setting["batch"], setting["prompt_length"]
    decode = float(np.median([sample["decode_ms_per_token"] for sample in samples])) / 1e3
    decode -= setup.seconds_per_context * batch * (prompt + setting["new_tokens"] / 2)
    steps = -(-batch * prompt // samples[0].get("step_tokens", STEP_TOKENS))
    prefill = float(np.median([sample["prefill_ms"] for sample in samples])) / 1e3
    prefill = (prefill - setup.seconds_per_pair * batch * prompt**2 / 2) / steps
    run = batch * prompt
    return [
        Row(setup, batch, decode, batch),
        Row(setup, int(computed(run // steps)), prefill, run if steps > 1 else int(computed(run))),
    ]


def computed(tokens: Any) -> Any:
    """The rows that the GEMMs of a step with prompts compute: whole tiles. tokens: a number, or an array of them."""
    return np.where(np.asarray(tokens) > TILE, -(-np.asarray(tokens) // TILE) * TILE, tokens)


def _fit(rows: Sequence[Row], predicted: Any, measured: Any, first: Any, second: Any) -> Figures:
    """The two figures whose predictions have the least mean error, in the logarithm. predicted: of a row and two grids."""
    grid = np.meshgrid(first, second, indexing="ij")
    errors = sum(np.abs(np.log(np.maximum(predicted(row, *grid), 1e-9) / measured(row))) for row in rows)
    best = np.unravel_index(np.argmin(errors), errors.shape)
    return float(grid[0][best]), float(grid[1][best])


class Tables:
    """Measured rows, and what is fitted to them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        single = [row for row in rows if row.setup.tp == 1 and row.setup.variant == "standard"]
        self.one_rank = {  # by GPU and width: launch, share
            key: _fit(
                [row for row in single if (row.setup.gpu.name, row.setup.width) == key],
                lambda row, launch, share: row.setup.roofline(row.tokens, launch, share),
                lambda row: row.seconds,
                np.arange(0, 60e-6, 1e-6),
                np.arange(0.3, 1.0, 0.01),
            )
            for key in {(row.setup.gpu.name, row.setup.width) for row in single}
        }
        several = [row for row in rows if row.setup.tp > 1 and row.setup.width == "bf16"]
        self.several_ranks = {  # by variant: launch beyond that on one GPU, exposed
            variant: _fit(
                [row for row in several if row.setup.config.variant_name == variant],
                lambda row, launch, exposed: (
                    self._on_one_rank(row.setup, row.tokens)
                    + row.setup.config.n_layers * launch
                    + exposed * row.setup.link_seconds(row.tokens)
                ),
                lambda row: row.seconds,
                np.arange(0, 40e-6, 1e-6),
                np.arange(0, 2, 0.05),
            )
            for variant in {row.setup.config.variant_name for row in several}
        }

    def figures(self, gpu: str, width: str) -> Figures:
        """The fitted figures of the GPU and width; if these were not measured, of the width on another GPU, or of a similar
        width."""
        like = LIKE.get(width, width)
        keys = [(name, w) for w in (width, like) for name in (gpu, *READ)]
        for key in keys:
            if key in self.one_rank:
                return self.one_rank[key]
        raise UserError(f"no step with {width} weights was measured on one GPU; add a sweep of one with --sweeps")

    def _on_one_rank(self, setup: Setup, tokens: Any) -> Any:
        return setup.roofline(tokens, *self.figures(setup.gpu.name, setup.width))

    def roofline(self, setup: Setup, tokens: Any) -> Any:
        """Seconds of a step without attention by the fitted figures alone."""
        seconds = self._on_one_rank(setup, tokens)
        if setup.tp == 1:
            return seconds
        launch, exposed = self._on_several_ranks(setup)
        return seconds + setup.config.n_layers * launch + exposed * setup.link_seconds(tokens)

    def _on_several_ranks(self, setup: Setup) -> Figures:
        """A hybrid's figures are between those of its two kinds of layers."""
        variant = setup.config.variant_name
        if variant == "hybrid" and {"ladder", "standard"} <= self.several_ranks.keys():
            share = len(setup.config.ladder_layers) / setup.config.n_layers
            pairs = zip(self.several_ranks["ladder"], self.several_ranks["standard"], strict=True)
            launch, exposed = (share * ladder + (1 - share) * standard for ladder, standard in pairs)
            return launch, exposed
        if variant not in self.several_ranks:
            raise UserError(
                f"variant {variant} was not measured on several GPUs; known: {', '.join(sorted(self.several_ranks))}"
            )
        return self.several_ranks[variant]

    def measured(self, setup: Setup) -> list[Row]:
        """The rows of the same layers on as many ranks, of the model with the most similar number of them."""
        same = [row for row in self.rows if row.setup.layer == setup.layer]
        nearest = min((abs(row.setup.config.n_layers - setup.config.n_layers) for row in same), default=0)
        return [row for row in same if abs(row.setup.config.n_layers - setup.config.n_layers) == nearest]

    def source(self, setup: Setup) -> str:
        """Where the times come from: `measured`, `measured with N layers` or `roofline`."""
        rows = self.measured(setup)
        layers = rows[0].setup.config.n_layers if rows else 0
        return "roofline" if not rows else "measured" if layers == setup.config.n_layers else f"measured with {layers} layers"

    def seconds(self, setup: Setup, tokens: Any) -> Any:
        """Seconds of a step without attention. tokens: a number, or an array of them."""
        factors: dict[int, list[float]] = {}
        for row in self.measured(setup):
            if row.run > row.tokens:  # the clock is lower then, see `heat`
                continue
            factors.setdefault(row.tokens, []).append(float(np.log(row.seconds / self.roofline(row.setup, row.tokens))))
        known = sorted(factors)
        factor = np.interp(np.log(tokens), np.log(known), [np.median(factors[n]) for n in known]) if known else 0.0
        return self.roofline(setup, tokens) * np.exp(factor)

    def heat(self, setup: Setup) -> float:
        """How much longer tokens of prompts take while the GPU computes nothing else and lowers its clock: measured prefills
        of many steps' tokens over one of a step's; at least 1, and 1 where only the roofline is known."""
        long = [row.seconds / row.tokens for row in self.measured(setup) if row.run >= LONG]
        return max(1.0, float(np.median(long) / (self.seconds(setup, LARGEST_GRAPH) / LARGEST_GRAPH))) if long else 1.0

    def without(self, setup: Setup) -> "Tables":
        """Tables that were never shown the rows of these layers on so many ranks."""
        return Tables([row for row in self.rows if row.setup.layer != setup.layer])


class Steps:
    """The seconds of a server's steps: those of the CUDA graph, or of the tokens themselves if there are more than it takes."""

    def __init__(self, tables: Tables, setup: Setup, most: int, budget: int) -> None:
        """most: --max-num-seqs. budget: --max-batch-tokens."""
        self.setup, self.most, self.budget, self.heat = setup, most, budget, tables.heat(setup)
        self._decode = self._padded(tables, decode_buckets(most), most)
        self._mixed = self._padded(tables, prefill_buckets(budget, setup.tp), budget, computed)
        self._context, self._pair = setup.seconds_per_context, setup.seconds_per_pair

    def _padded(
        self, tables: Tables, buckets: list[int], largest: int, rows_of: Callable[[Any], Any] = lambda n: n
    ) -> list[float]:
        sizes = np.arange(largest + 1)
        padded = np.append(buckets, sizes[sizes > max(buckets)])
        return list(tables.seconds(self.setup, rows_of(padded))[np.searchsorted(padded, sizes)])

    def heated(self, share: float) -> "Steps":
        """These steps while prompts take that share of the time: their tokens take longer in proportion."""
        steps, factor = copy(self), 1 + (self.heat - 1) * share
        steps._mixed = [seconds * factor for seconds in self._mixed]
        return steps

    def seconds(self, rows: int, context: int, tokens: int, pairs: float) -> float:
        """Seconds of a step with `rows` decoding sequences of `context` tokens in all, and `tokens` of prompts that attend to
        `pairs`."""
        linear = self._mixed[rows + tokens] if tokens else self._decode[rows]
        read = context * self._context / (MIXED_SHARE if tokens else 1)
        return linear + read + pairs * self._pair

    def repeated(self, rows: int, context: int, count: int) -> float:
        """Seconds of `count` steps without prompts, one after the other."""
        return count * self.seconds(rows, context, 0, 0) + rows * count * (count - 1) / 2 * self._context

    def repeats(self, rows: int, context: int, most: int, until: float, lead: float) -> int:
        """How many steps without prompts follow each other: up to `most`, until one has begun and at most `lead` seconds are
        left of it when a request arrives, at `until` seconds."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            begin, end = (self.repeated(rows, context, k) for k in (middle - 1, middle))
            low, high = (low, middle) if max(begin, end - lead) >= until else (middle + 1, high)
        return low

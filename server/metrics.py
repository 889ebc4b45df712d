"""Metrics of the server: in Prometheus' format for /metrics, and of the last minute for the page's dashboard.

/metrics has them twice, as `rung:NAME` and under the names that vLLM 0.24 and older versions have for the same numbers.
Routers and dashboards read those: the production stack's router (vllm_router/stats/engine_stats.py), llm-d and the Kubernetes
Gateway API Inference Extension (docs/proposals/003-model-server-protocol).
"""

import math
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter as Tally
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.protocol import Drafted, Stats
from server.tracing import current_spans

PERIOD, PERIODS = 10, 6  # /stats has the latencies of so many periods of so many seconds, the present one among them
CLASS = math.log(1.02)  # latencies that differ by less may count as equal
RATE_WINDOW = 5.0  # seconds; tokens/s is the mean over this time

LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_LATENCY = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

# Metrics that vLLM has under the same names after `vllm:`, as they stand in /metrics, and names in versions before 0.11, which
# routers still read.
SAME_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "cache_config_info",
    "lora_requests_info",
)
OLD_NAMES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
VLLM_NAMES = {name: name for name in SAME_NAMES} | OLD_NAMES  # from theirs to ours

disable_created_metrics()


class Latencies:
    """The latencies of the last minute (50 to 60 s), to 1%. It counts those of each class in each period, so that neither
    memory nor the time for the quantiles grows with the number of tokens."""

    def __init__(self) -> None:
        self._counts = defaultdict[int, defaultdict[int, int]](lambda: defaultdict(int))  # by period and class

    def add(self, now: float, value: float, count: int = 1) -> None:
        """Add `count` equal latencies in seconds. `now`: time.monotonic()."""
        self._counts[int(now / PERIOD)][round(math.log(max(value, 1e-6)) / CLASS)] += count
        if len(self._counts) > PERIODS:
            del self._counts[next(iter(self._counts))]

    def quantiles(self) -> dict[str, float | None]:
        """The median and the 95th percentile; None without latencies."""
        oldest, total = int(time.monotonic() / PERIOD) - PERIODS, Tally[int]()
        for period, counts in self._counts.items():
            if period > oldest:
                total.update(counts)
        classes = sorted(total)
        ranks = list(accumulate(total[one] for one in classes))  # how many latencies there are up to each class
        return {
            f"p{p}": math.exp(CLASS * classes[bisect_right(ranks, ranks[-1] * p // 100)]) if ranks else None for p in (50, 95)
        }


class Rate:
    """What was added in the last RATE_WINDOW seconds, per second."""

    def __init__(self) -> None:
        self._values = deque[tuple[float, int]]()
        self._sum = 0

    def add(self, now: float, value: int) -> None:
        """Add a value. `now`: time.monotonic()."""
        self._forget(now)
        self._values.append((now, value))
        self._sum += value

    def _forget(self, now: float) -> None:
        while self._values and self._values[0][0] < now - RATE_WINDOW:
            self._sum -= self._values.popleft()[1]

    def rate(self) -> float:
        self._forget(time.monotonic())
        return self._sum / RATE_WINDOW


class TokenHistogram(Collector):
    """A fast histogram for values that occur once per token. prometheus_client's takes a lock and loops over the buckets."""

    def __init__(self, name: str, text: str, model_name: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._model_name, self._bounds = name, text, model_name, bounds
        self._counts = [0] * (len(bounds) + 1)  # the last one counts values above all bounds
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Observe `value` `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        family.add_metric([self._model_name], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class Info(Collector):
    """A gauge whose labels are the information. labels: returns the present ones, or None if they are not known yet."""

    def __init__(self, name: str, text: str, labels: Callable[[], dict[str, str] | None], value: Callable[[], float]) -> None:
        self._name, self._text, self._labels, self._value = name, text, labels, value

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if (labels := self._labels()) is not None:
            family = GaugeMetricFamily(self._name, self._text, labels=list(labels))
            family.add_metric(list(labels.values()), self._value())
            yield family


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.stats = Stats()  # the newest; this one until the engine sends its first
        self.ttft, self.inter_token = Latencies(), Latencies()
        self.tokens, self.prompts = Rate(), Rate()

        self.running = self._gauge("num_requests_running", "Sequences in the running batch")
        self.waiting = self._gauge("num_requests_waiting", "Sequences that wait for a place in the batch")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Used share of the KV cache; 1 is all of it")
        self.step_seconds = self._gauge("step_time_seconds", "Mean time of a step, since the last report of the engine")
        self.all_reduce_share = self._gauge("all_reduce_time_share", "Share of a step that waits for all-reduces; NaN on GPUs")
        self.idle_share = self._gauge("gpu_idle_share", "Share of a step in which the GPU waits for the host; NaN on CPUs")
        # tokens of a draft that were right, on average, in the newest report with drafts
        self.accepted_length: float | None = None
        self.drafts = self._labelled("spec_decode_num_drafts", "Drafts that were verified, by source", "source")
        self.draft_tokens = self._labelled("spec_decode_num_draft_tokens", "Their tokens", "source")
        self.accepted_tokens = self._labelled("spec_decode_num_accepted_tokens", "Their tokens that were right", "source")
        self.steps = self._counter("engine_steps", "Steps of the engine")
        self.all_step_seconds = self._counter("engine_step_seconds", "Seconds of the engine's steps")
        help_text = "Seconds of the engine's steps in which the GPU waits for the host; without a value on CPUs"
        self.idle_seconds = self._labelled("gpu_idle_seconds", help_text)
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache")
        self.preemptions = self._counter("num_preemptions", "Preempted sequences, whose KV cache is computed again")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that started")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.recoveries = self._counter("recoveries", "Starts of ranks after others had ended")
        self.recovery_seconds = self._counter("recovery_seconds", "Seconds until they served again")
        self.replayed_tokens = self._counter("replayed_tokens", "Tokens of prompts and answers that were sent to ranks again")
        self.overflowed = self._counter(
            "overflowed_requests", "Requests that failed because numbers of the model were not finite"
        )
        self.unjournaled = self._counter("unjournaled_requests", "Accepted requests that could not be written to the journal")
        self.resumed = self._counter("resumed_requests", "Requests of the journal that went on without their clients")
        help_text = "Finished sequences by reason: stop, length, abort, error"
        self.finished = self._labelled("request_success", help_text, "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(model_name, reason)
        self.responses = self._labelled("http_responses", "Responses by path and status", "path", "status")

        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds", "From a sequence's submission to its first token", LATENCY
        )
        help_text = "Between the tokens of a sequence"
        self.itl_seconds = TokenHistogram("rung:inter_token_latency_seconds", help_text, model_name, TOKEN_LATENCY)
        self.registry.register(self.itl_seconds)
        self.e2e_seconds = self._histogram("e2e_request_latency_seconds", "From a sequence's submission to its end", REQUEST)
        self.queue_seconds = self._histogram(
            "request_queue_time_seconds", "From a sequence's arrival to its first step", REQUEST
        )
        self.prefill_seconds = self._histogram(
            "request_prefill_time_seconds", "From its first step to its first token", REQUEST
        )
        self.decode_seconds = self._histogram("request_decode_time_seconds", "From its first token to its last one", REQUEST)
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step", COUNTS)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence", COUNTS)
        self.request_generation = self._histogram("request_generation_tokens", "Generated tokens of a sequence", COUNTS)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"rung:{name}", text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(name, text).labels(self._model_name)

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        """A counter without a value until one is counted, with these labels beside the model's name."""
        return Counter(f"rung:{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"rung:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return metric.labels(self._model_name)

    def add_info(
        self, name: str, text: str, labels: Callable[[], dict[str, str] | None], value: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Add an `Info` with these labels and the model's name."""

        def all_labels() -> dict[str, str] | None:
            known = labels()
            return None if known is None else {"model_name": self._model_name, **known}

        self.registry.register(Info(f"rung:{name}", text, all_labels, value))

    def render(self) -> bytes:
        own = generate_latest(self.registry).decode()
        # A family begins with its HELP. Copying its text costs less than collecting it again.
        families = {text.partition(" ")[0]: text.removesuffix("\n") for text in ("\n" + own).split("\n# HELP rung:")[1:]}
        copies = [_renamed(families[ours], ours, theirs) for theirs, ours in VLLM_NAMES.items() if ours in families]
        return (own + "".join(copies)).encode()

    def on_tokens(self, now: float, count: int) -> None:
        """Record that `count` tokens of any sequences arrived together. `now`: time.monotonic()."""
        self.generation_tokens.inc(count)
        self.tokens.add(now, count)

    def on_stats(self, stats: Stats) -> None:
        last, self.stats = self.stats, stats
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_usage.set(stats.kv_cache_usage)
        self.step_seconds.set(stats.step_seconds)
        if stats.steps != last.steps:
            self.all_reduce_share.set(math.nan if stats.all_reduce_share is None else stats.all_reduce_share)
            self.idle_share.set(math.nan if stats.idle_share is None else stats.idle_share)
        self.prefix_queries.inc(max(0, stats.prefix_queries - last.prefix_queries))
        self.prefix_hits.inc(max(0, stats.prefix_hits - last.prefix_hits))
        self.preemptions.inc(max(0, stats.preemptions - last.preemptions))
        self.steps.inc(max(0, stats.steps - last.steps))
        seconds = len(stats.batch_tokens) * stats.step_seconds  # since the last report, whichever frontend read that
        self.all_step_seconds.inc(seconds)
        if stats.idle_share is not None:
            self.idle_seconds.labels(self._model_name).inc(stats.idle_share * seconds)
        for tokens in stats.batch_tokens:
            self.step_tokens.observe(tokens)
        self._on_drafted(stats.drafted, last.drafted)

    def on_recovery(self, seconds: float) -> None:
        """Record that the ranks are ready for this frontend, after `seconds` without them. The statistics of new ones begin at
        0."""
        self.stats = Stats()
        self.recoveries.inc()
        self.recovery_seconds.inc(seconds)

    def _on_drafted(self, now: dict[str, Drafted], last: dict[str, Drafted]) -> None:
        drafts = accepted = 0
        for source, total in now.items():
            before, labels = last.get(source, Drafted()), (self._model_name, source)
            pairs = zip(msgspec.structs.astuple(total), msgspec.structs.astuple(before), strict=True)
            new = Drafted(*(max(0, count - old) for count, old in pairs))
            self.drafts.labels(*labels).inc(new.drafts)
            self.draft_tokens.labels(*labels).inc(new.tokens)
            self.accepted_tokens.labels(*labels).inc(new.accepted)
            drafts += new.drafts
            accepted += new.accepted
        if drafts:
            self.accepted_length = accepted / drafts


def _renamed(family: str, ours: str, theirs: str) -> str:
    """The text of a metric, without the beginning of its HELP line, under vLLM's name. Only names stand at a line's
    beginning."""
    lines = re.sub(f"^(# TYPE )?rung:{ours}", rf"\1vllm:{theirs}", family, flags=re.MULTILINE)
    return f"# HELP vllm:{theirs}{lines.removeprefix(ours)}\n"


class SequenceTimes:
    """Measures the times of one sequence from its submission, and records them in the metrics and in its request's spans."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self.metrics, self.prompt_tokens = metrics, prompt_tokens
        self.started = self.last = time.monotonic()
        self.first: float | None = None
        self.queue_seconds: float | None = None
        self.tokens = 0
        self._spans = current_spans.get()
        if self._spans:
            self._spans.on_submit(self.started)

    def on_tokens(self, now: float, count: int, queue_seconds: float, prefill_seconds: float) -> None:
        """Record when tokens arrived. `now`: time.monotonic(). `Metrics.on_tokens` counts the tokens themselves."""
        m = self.metrics
        if not count:  # an embedding
            self._on_prompt(now, queue_seconds, prefill_seconds)
            return
        if self.first is None:
            self._on_first(now, queue_seconds, prefill_seconds)
        else:
            gap = (now - self.last) / count
            m.itl_seconds.observe(gap, count)
            m.inter_token.add(now, gap, count)
        self.last = now
        self.tokens += count

    def _on_first(self, now: float, queue_seconds: float, prefill_seconds: float) -> None:
        m = self.metrics
        self.first = now
        m.ttft_seconds.observe(now - self.started)
        m.ttft.add(now, now - self.started)
        self._on_prompt(now, queue_seconds, prefill_seconds)

    def _on_prompt(self, now: float, queue_seconds: float, prefill_seconds: float) -> None:
        m, self.queue_seconds = self.metrics, queue_seconds
        m.queue_seconds.observe(queue_seconds)
        m.prefill_seconds.observe(prefill_seconds)
        m.prompt_tokens.inc(self.prompt_tokens)
        m.prompts.add(now, self.prompt_tokens)
        m.request_prompt.observe(self.prompt_tokens)

    def on_end(self, reason: str) -> None:
        now, m = time.monotonic(), self.metrics
        m.finished.labels(m._model_name, reason).inc()
        m.e2e_seconds.observe(now - self.started)
        m.request_generation.observe(self.tokens)
        if self.first is not None:
            m.decode_seconds.observe(now - self.first)
        if self._spans:
            attributes = {"rung.tokens": self.tokens, "gen_ai.response.finish_reasons": [reason]}
            self._spans.on_sequence(self.started, self.queue_seconds, self.first, now, attributes)

"""The engine's steps on this rank: chunks of sequences in, a token for each sequence that was computed to its end, and one more for
each token of its draft that proves right.

A step is launched first, and collected when its tokens are needed. The next step can be launched before the tokens of the
current one are known: they stay on the device. Only a draw with a grammar's mask or banned sequences needs the token before on the
host.

On a GPU a decode step is one replay of a CUDA graph, and so is a step with prompt chunks of usual size. A graph contains the
model's kernels, its collectives with their side streams, the head, the drawing of tokens, and for decode steps the copy of the
tokens into the next step's inputs. A step is padded to the next larger bucket; padding rows do nothing. Steps of more than
`largest_graph` tokens run the same code without a graph. On a CPU all steps do, without padding. Tokens that depend on more than
the logits, the temperature and the seed are drawn after the graph.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from tqdm import tqdm

from comms.interface import fault_word, raise_fault
from comms.table import bucket
from engine.head_model import HeadModel
from engine.paged_cache import PagedCache
from engine.protocol import SamplingParams, TokenLogprobs
from engine.sampler import (
    PendingLogprobs,
    Pooled,
    SamplingBatch,
    SamplingState,
    count_drawn,
    is_plain,
    may_change,
    pool,
    process,
    reads_tokens,
    sample,
    score_prompts,
    scores_prompt,
)
from engine.schedules import Captured, Graphs, Schedules
from engine.sequence import Chunk, Sequence, drawn_by
from engine.step_inputs import ROUND, Capacity, DecodeInputs, SpanInputs, to_device, to_host
from kernels.dispatch import successive_seconds
from kernels.sampling import NO_TOKEN, combine_best, local_best
from layers.attention import AttentionContext
from model import Transformer, scaled

# --- a step that was launched, and its results -------------------------------------------------------------------------------


@dataclass
class StepResult:
    """A token, and its log-probabilities or None, for each draw."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass
class Output:
    """A step's results on the device."""

    last: Tensor  # (W, C), the W rows from which a token is drawn
    tokens: Tensor | None  # (W,) int64, drawn with only the logits, the temperature and the seed; None on a CPU
    streams: list[Tensor]  # (T, C) each, of the runner's `stream_layers`
    hidden: Tensor | None = None  # (T, C), all rows, of a step that scores a prompt or takes a mean


@dataclass
class InFlightStep:
    """A step that was launched. `drawn` is None until its tokens are drawn."""

    chunks: list[Chunk]
    sampling: list[Chunk]  # those that sample, in the same order
    hidden: Tensor  # (W, C), the W rows of their `draws`; a later launch may overwrite it
    has_drafts: bool
    streams: list[Tensor] = field(default_factory=list)  # (T, C) each, of all rows; a later launch may overwrite them
    drawn: Tensor | None = None  # (W,) int64, on the device
    tokens: Tensor | None = None  # the same in host memory, valid after `ready`
    fault: Tensor | None = (
        None  # of the waits for other ranks until then, valid after `ready`; see `comms.interface.fault_word`
    )
    scored: list[int] = field(default_factory=list)  # the draws whose requests ask for log-probabilities
    logprobs: PendingLogprobs | None = None  # of these, valid after `ready`
    pooled: Pooled | None = None  # valid after `ready`
    # when the device could begin the step, with its inputs laid out, and when it had the tokens; None on a CPU
    begin: "torch.cuda.Event | None" = None
    ready: "torch.cuda.Event | None" = None
    launches: tuple[str, int] = ("", 0)  # what the device runs: the graph's key, or the same of a step without a graph
    # by time.perf_counter(): when it had been launched, and when the device had its tokens; None if they were not waited for
    launched: float = 0.0
    ended: float | None = None


Key = tuple[str, int]  # of a graph: `decode` or `prefill`, and its rows

LARGEST_GRAPH = 2048  # tokens, on up to 2 ranks
LARGEST_MEASURED = 8192  # tokens of a step; larger ones, whose all-reduces are too long to be fused, use the default schedule


def decode_buckets(sequences: int) -> list[int]:
    """Batch sizes that have a graph. Padding rows cost little, because a decode step mostly reads weights."""
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, sequences, 32)]
    return [*(n for n in sizes if n < sequences), sequences]


def largest_graph(ranks: int) -> int:
    """The most tokens that have a graph. A larger step takes the device longer than the host needs to launch its kernels one by one.
    Each of more ranks computes less of a step, but launches no fewer kernels."""
    return LARGEST_GRAPH * max(1, ranks // 2)


def prefill_buckets(tokens: int, ranks: int) -> list[int]:
    """Numbers of tokens that have a graph. Large ones are close together, because padding rows take computing time. A
    step with a prompt of a round length also has one row for each decoding sequence, so there are sizes just above it."""
    sizes = [16, 64, 128, 192, 256, 320, 384, 512, 576, 768, 1024, 1088, 1152, 1216, 1280, 1536, 1792]
    sizes += [*range(2048, 4096, 512), *range(4096, 8192, 1024)]
    largest = min(tokens, largest_graph(ranks))
    return [*(n for n in sizes if n < largest), largest]


def long_steps(largest: int, tokens: int) -> list[int]:
    """Numbers of tokens above `largest`, which has a graph, up to `tokens`: the most of each bucket of fused all-reduces."""
    sizes = [largest]
    while sizes[-1] < tokens:
        sizes.append(min(bucket(sizes[-1] + 1), tokens))
    return sizes[1:]


class Runner:
    """Computes the steps of one model, the target or a draft model, on this rank."""

    def __init__(
        self,
        model: Transformer | HeadModel,
        cache: PagedCache,
        text_ids: int,
        capacity: Capacity,
        schedules: Schedules,
        stream_layers: tuple[int, ...] = (),
        shift: int = 0,
        adapters: int = 0,
    ) -> None:
        """text_ids: how many ids the tokenizer has. The model's vocabulary may be padded; those ids are never drawn. stream_layers:
        of which steps keep the residual streams, see `Transformer.hidden_and_streams`. shift: the model's token 0 is
        the sequence's token `shift`: 1 for a draft head, else 0. adapters: slots of the model's adapters."""
        self.stream_layers, self.shift = stream_layers, shift
        self.model, self.cache, self.text_ids, self.capacity, self.schedules = model, cache, text_ids, capacity, schedules
        self.device = cache.keys_values.device
        self.max_length = capacity.blocks * cache.block_size
        self.decode, self.spans = DecodeInputs(capacity, self.device, adapters), SpanInputs(capacity, self.device, adapters)
        self.graphs = Graphs(self.device) if self.device.type == "cuda" else None
        if self.graphs is not None and len(schedules.possible) > 1:
            # measured steps attend to this; zeros would take less power
            cache.invent()
        ranks = model.comm.world_size
        self._decode_sizes, self._prefill_sizes = decode_buckets(capacity.draws), prefill_buckets(capacity.rows, ranks)
        self._last_batch: tuple[list[Sequence], tuple[SamplingBatch, bool]] | None = None
        self._fault = fault_word(self.device)
        self.idle_seconds = 0.0  # for which the device waited for the next step
        self._last_ready: torch.cuda.Event | None = None

    # --- what a graph contains -------------------------------------------------------------------------------------------

    def _decode_step(self, rows: int) -> Output:
        """Draw the token after each of `rows` tokens, and write the inputs of the next decode step as if each was a sequence's
        last. Rows of one sequence, its draft, see each other: a layer stores the keys of all rows before they attend."""
        inputs = self.decode
        context = inputs.context(rows, self.cache, self.max_length)
        hidden, streams = self._hidden(inputs.tokens[:rows], context)
        tokens = self._drawn(hidden, inputs.temperature(rows), inputs.seed[:rows], context.positions + (1 + self.shift))
        torch.clamp(tokens, min=0, out=inputs.tokens[:rows])  # after NO_TOKEN, nobody reads what follows
        inputs.positions[:rows].add_(inputs.positions[:rows] >= inputs.first_kept)
        return Output(hidden, tokens, streams)

    def _span_step(self, rows: int, spans: int, draws: int, max_span: int, scored: bool = False) -> Output:
        """Compute `rows` tokens of `spans` chunks. On a GPU, also draw `draws` tokens from the last rows of the chunks that reach
        the end of their sequence. Other rows end after the last layer's attention, unless `scored` asks for all."""
        inputs = self.spans
        context = inputs.context(rows, spans, self.cache, max_span)
        # where each row draws, as in most steps of a CPU, no rows have to be copied
        drawing = None if max_span == 1 and draws == spans else inputs.drawing(draws)
        hidden, streams = self._hidden(inputs.tokens(rows), context, None if scored else drawing)
        last = hidden[drawing] if scored and drawing is not None else hidden[:draws]
        drawn = None if self.graphs is None else self._drawn(last, *inputs.draws(draws))
        return Output(last, drawn, streams, hidden if scored else None)

    def _hidden(self, tokens: Tensor, context: AttentionContext, rows: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """tokens (T,) to the last hidden state (T, C), or (W, C) of the W wanted `rows`, and the kept streams, (T, C) each."""
        hidden, streams = self.model.hidden_and_streams(tokens[None], context, self.stream_layers, rows)
        return hidden[0], [stream[0] for stream in streams]

    def _drawn(self, hidden: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
        """Draw a token for each row of hidden (B, C): the best of the ranks' candidates from their parts of the vocabulary."""
        model = self.model
        logits = model.head(model.norm(hidden))
        if model.config.logits_scaling != 1:  # as in `Transformer.logits`
            logits = scaled(logits.float(), 1 / model.config.logits_scaling)
        best = local_best(logits, temperature, seed, positions, model.vocab.start, self.text_ids)
        return combine_best(model.comm.all_gather(best))

    # --- graphs ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, quiet: bool = True) -> None:
        """Capture all graphs before requests arrive, the largest first, so that the smaller ones share its memory. Collective."""
        if self.graphs is None:
            return
        if not self.model.config.causal:  # its steps have no graphs
            self._try_long_steps(0)
            return
        for rows in tqdm(self._decode_sizes[::-1], desc="decode graphs", disable=quiet):
            self._capture_decode(self.graphs, rows)
        for rows in tqdm(self._prefill_sizes[::-1], desc="prefill graphs", disable=quiet):
            self._capture_prefill(self.graphs, rows)
        self._try_long_steps(self._prefill_sizes[-1])

    def is_captured(self, sequences: int) -> bool:
        """Whether a decode step of so many sequences needs no capture."""
        rows = next((n for n in self._decode_sizes if n >= sequences), None)
        return self.graphs is None or rows is None or ("decode", rows) in self.graphs

    def _capture_decode(self, graphs: Graphs, rows: int) -> None:
        if ("decode", rows) not in graphs:
            self.decode.clear()
            self._capture(graphs, "decode", rows, lambda: self._decode_step(rows), self.decode)
            self.decode.clear()

    def _capture_prefill(self, graphs: Graphs, rows: int) -> None:
        if ("prefill", rows) not in graphs:
            self._capture(graphs, "prefill", rows, self._padding_step(rows), self.spans)

    def _capture(
        self, graphs: Graphs, kind: str, rows: int, step: Callable[[], Output], inputs: DecodeInputs | SpanInputs
    ) -> None:
        invent = partial(inputs.invent, rows, self.text_ids, self.cache)
        graphs.keep((kind, rows), self.schedules.fastest(f"{kind} {rows}", lambda: graphs.capture(step), invent))

    def _try_long_steps(self, largest: int) -> None:
        """Run steps that have no graph, of more than `largest` tokens, one of each bucket up to the capacity.

        This compiles kernels, and a communicator may measure the fastest algorithm for such all-reduces.
        """
        for rows in long_steps(largest, self.capacity.rows):
            self._schedule_long_step(rows)
            self._padding_step(rows)()

    def _padding_step(self, rows: int) -> Callable[[], Output]:
        """A step of so many rows, all of them padding."""
        self.spans.write([], rows, self.cache.block_size)
        return lambda: self._span_step(*self._padded(rows))

    def _padded(self, rows: int) -> tuple[int, int, int, int]:
        """The arguments of `_span_step` for any chunks of so many rows. Kernels are compiled for numbers of spans and of draws, so a
        step without a graph has the same ones as that which `_try_long_steps` ran before requests arrived."""
        return rows, min(rows, self.capacity.sequences), min(rows, self.capacity.draws), rows

    def _schedule_long_step(self, rows: int) -> None:
        """Use the schedule for a step of so many rows without a graph: that of the next power of two, which is measured first
        unless it is too large."""
        rows = min(1 << (rows - 1).bit_length(), self.capacity.rows)

        def prepare() -> Captured:
            step = self._padding_step(rows)
            step()  # compiles kernels
            return Captured(step, None)

        if self.schedules.is_open(case := f"prefill {rows}") and rows <= LARGEST_MEASURED:
            self.schedules.fastest(case, prepare, lambda: self.spans.invent(rows, self.text_ids, self.cache))
        self.schedules.use(case)

    @torch.inference_mode()
    def seconds(self, rows: int, sequences: int | None = None) -> float:
        """The seconds of a step that draws a token from each of `rows` rows. sequences: at most so many have these rows (None:
        the capacity); it matters on a CPU only. No step may be in flight. Collective."""
        if self.graphs is None:
            return self._seconds_on_cpu(rows, sequences or self.capacity.sequences)
        case = next(n for n in self._decode_sizes if n >= rows)
        self._capture_decode(self.graphs, case)
        self.decode.invent(case, self.text_ids, self.cache)
        [seconds] = successive_seconds(partial(self.graphs.replay, ("decode", case)), 1)
        self.decode.clear()
        return seconds

    def _seconds_on_cpu(self, rows: int, sequences: int) -> float:
        """The same for sequences of one token, with drafts if there are more rows. They lie in the cache's first block, which keeps its
        contents."""
        count, chunks = min(rows, sequences), []
        for length in [rows // count + (i < rows % count) for i in range(count)]:
            blocks = [0] * -(-length // self.cache.block_size)
            sequence = Sequence("", [0], 0, SamplingParams(), blocks=blocks, state=SamplingState())
            chunks.append(Chunk(sequence, 0, length, samples=True, is_known=True, draft=[0] * (length - 1)))
        first = [
            (held[:, :, 0], held[:, :, 0].clone()) for held in (self.cache.keys_values, self.cache.scales) if held is not None
        ]
        start = time.perf_counter()
        self.collect(self.launch(chunks))
        seconds = time.perf_counter() - start
        for place, before in first:
            place.copy_(before)
        self.rest()
        return seconds

    @torch.inference_mode()
    def host_seconds(self) -> float:
        """By how much a step takes longer if it is not launched before the last one has ended; 0 on a CPU. No step may be in
        flight. Collective."""
        if self.graphs is None:
            return 0.0
        step = self.seconds(1)
        start = time.perf_counter()
        self.decode.write([])  # padding alone
        output: Output = self.graphs.replay(("decode", self._decode_sizes[0]))
        assert output.tokens is not None
        output.tokens.tolist()
        return max(0.0, time.perf_counter() - start - step)

    # --- steps -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], after: InFlightStep | None = None) -> InFlightStep:
        """Start a step, and draw its tokens unless one of them needs the token before on the host. after: the step before, if it is
        still in flight; the tokens that the host does not know yet are drawn by it."""
        chunks = list(chunks)
        sampling, tokens = [c for c in chunks if c.samples], sum([c.count for c in chunks])
        draws = len(sampling) + (sum([len(c.draft) for c in chunks]) if self.capacity.drafted else 0)
        pooling = {c.sequence.params.pooling for c in chunks} - {None}
        scored = "mean" in pooling or any(map(scores_prompt, chunks))
        compute: Callable[[], Output]
        launches: Key = ("prefill", tokens)
        if self.graphs is None:
            self._write_spans(chunks, tokens, after)
            compute = partial(self._span_step, tokens, len(chunks), max(1, draws), max([c.count for c in chunks]), scored)
        elif self.model.config.causal and len(sampling) == len(chunks) and draws == tokens and not scored:
            launches = self._lay_out_decode(self.graphs, chunks, draws, after)
            compute = partial(self.graphs.replay, launches)
        else:
            launches, compute = self._lay_out_spans(self.graphs, chunks, tokens, scored, after)
        begin = self._event()  # not earlier: if the step before ends meanwhile, the device waits until here
        output = compute()
        if output.hidden is not None:
            score_prompts(self.model.logits, chunks, output.hidden)
        step = InFlightStep(chunks, sampling, output.last[:draws], draws > len(sampling), output.streams, begin=begin)
        step.launches = launches
        if pooling:
            step.pooled = pool(self.model.norm, chunks, output.last, output.hidden)
        if output.tokens is not None and all(is_plain(c.sequence) for c in sampling):
            self._copy_to_host(step, output.tokens[:draws])
        elif all(c.is_known or not reads_tokens(c.sequence) for c in step.sampling):
            self.draw(step)
        step.launched = time.perf_counter()
        return step

    def _lay_out_decode(self, graphs: Graphs, chunks: list[Chunk], draws: int, after: InFlightStep | None) -> Key:
        """Write the inputs of a decode step. Returns the key of its graph."""
        rows = next(n for n in self._decode_sizes if n >= draws)
        self._capture_decode(graphs, rows)
        if draws > len(chunks) or not self.decode.continues(chunks):
            self.decode.write(chunks)
            if after is not None:
                self._write_drawn(self.decode.tokens, chunks, after)
        rows_of = chunks if draws == len(chunks) else [c for c in chunks for _ in range(c.count)]
        self.decode.tables.update([c.sequence.blocks for c in rows_of])
        return "decode", rows

    def _lay_out_spans(
        self, graphs: Graphs, chunks: list[Chunk], tokens: int, scored: bool, after: InFlightStep | None
    ) -> tuple[Key, Callable[[], Output]]:
        """Write the inputs of a step with prompt chunks. Returns the key of its graph, or of one that it had, and what launches it."""
        self.decode.forget()
        graph_rows = next((n for n in self._prefill_sizes if n >= tokens), None) if self.model.config.causal else None
        rows = graph_rows or -(-tokens // ROUND) * ROUND
        if graph_rows is None:
            self._schedule_long_step(rows)
        else:
            self._capture_prefill(graphs, rows)
        self._write_spans(chunks, rows, after)
        if graph_rows is None or scored:  # a graph keeps only the rows that draw
            return ("prefill", rows), partial(self._span_step, *self._padded(rows), scored)
        return ("prefill", rows), partial(graphs.replay, ("prefill", rows))

    def _write_spans(self, chunks: list[Chunk], rows: int, after: InFlightStep | None) -> None:
        """Write the inputs of a step of `rows` rows, padding included."""
        self.spans.write(chunks, rows, self.cache.block_size)
        if self.graphs is not None:
            self.spans.write_draws(chunks, self.shift)
        if after is not None:
            self._write_drawn(self.spans.tokens(rows), chunks, after)

    def _write_drawn(self, inputs: Tensor, chunks: list[Chunk], after: InFlightStep) -> None:
        """Write the tokens that the host does not know, from the step that draws them to their rows of `inputs` (T,)."""
        ends = accumulate(c.count for c in chunks)
        unknown = [(c.sequence, end - 1) for c, end in zip(chunks, ends, strict=True) if not c.is_known]
        if unknown:
            assert after.drawn is not None and not after.has_drafts
            places = {c.sequence: i for i, c in enumerate(after.sampling)}
            pairs = [[row for _, row in unknown], [places[sequence] for sequence, _ in unknown]]
            rows, sources = to_device(pairs, torch.int64, self.device)
            inputs.index_copy_(0, rows, after.drawn[sources].clamp(min=0))

    def _copy_to_host(self, step: InFlightStep, drawn: Tensor) -> None:
        """Start to copy the drawn tokens to the host."""
        step.drawn, step.tokens, step.fault = drawn, to_host(drawn), to_host(self._fault)
        step.ready = self._event()

    def _event(self) -> "torch.cuda.Event | None":
        """An event at this point of the current stream; None on a CPU."""
        if self.graphs is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait_from(self, event: "torch.cuda.Event | None") -> None:
        """The device had other work until this event; only then did it begin to wait for the next step."""
        self._last_ready = event or self._last_ready

    @torch.inference_mode()
    def clear(self, blocks: list[int]) -> None:
        """Set blocks of the cache to zero, after the steps in flight."""
        self.cache.clear(to_device(blocks, torch.int64, self.device))

    def rest(self) -> None:
        """There is no work: until the next step, the device does not wait for the host, and ended sequences are not kept."""
        self._last_ready = self._last_batch = None
        self.decode.forget()

    @torch.inference_mode()
    def collect(self, step: InFlightStep) -> StepResult:
        """The step's tokens, which must be drawn, NO_TOKEN where a number is not finite; waits for the device. Raises RuntimeError if a wait for another rank gave up."""
        if step.ready is not None and step.begin is not None:
            early = not step.ready.query()
            step.ready.synchronize()
            step.ended = time.perf_counter() if early else None
            if self._last_ready is not None:
                self.idle_seconds += self._last_ready.elapsed_time(step.begin) / 1e3
            self._last_ready = step.ready
        if step.fault is not None:
            raise_fault(step.fault)
        tokens = [] if step.tokens is None else step.tokens.tolist()
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        if step.logprobs is not None:
            for i, entry, finite in zip(step.scored, step.logprobs.read(), step.logprobs.finite(), strict=True):
                found[i] = entry
                tokens[i] = tokens[i] if finite else NO_TOKEN
        return StepResult(tokens, found)

    # --- draws with parameters that need the logits ----------------------------------------------------------------------

    @torch.inference_mode()
    def draw(self, step: InFlightStep) -> None:
        """Draw the step's tokens with each request's parameters, if they are not drawn yet. Grammars must have seen all tokens
        of the steps before."""
        if step.drawn is not None or not step.sampling:
            return
        sequences, positions = drawn_by(step.sampling, self.shift)
        raw = self.model.logits(step.hidden)
        drawn = self._sample(raw, step.sampling, sequences, positions)
        if self.decode.continues(step.chunks):
            torch.clamp(drawn, min=0, out=self.decode.tokens[: len(drawn)])  # the graph has drawn others there
        step.scored = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
        if step.scored:
            index = to_device(step.scored, torch.int64, self.device)
            tops = [sequences[i].params.logprobs or 0 for i in step.scored]
            step.logprobs = PendingLogprobs.of(raw[index], drawn[index], tops)
        self._copy_to_host(step, drawn)

    def _sample(self, raw: Tensor, chunks: list[Chunk], sequences: list[Sequence], positions: list[int]) -> Tensor:
        batch, changes = self._batch(sequences)
        logits = process(raw, [draw for c in chunks for draw in c.draws]) if changes else raw
        if self.text_ids < logits.shape[-1]:
            logits = logits.clone() if logits is raw else logits
            logits[:, self.text_ids :] = -torch.inf
        drawn = sample(logits, batch, to_device(positions, torch.int64, self.device)[:, None])
        if changes:
            count_drawn(chunks, drawn)
        return drawn

    def _batch(self, sequences: list[Sequence]) -> tuple[SamplingBatch, bool]:
        """The sequences' sampling parameters as tensors, and whether some of them change logits. Kept for the next step, which
        mostly has the same sequences."""
        if self._last_batch is None or self._last_batch[0] != sequences:  # compares objects: a request id may be used again
            batch = SamplingBatch.of([s.params for s in sequences], self.device)
            self._last_batch = sequences, (batch, any(map(may_change, sequences)))
        return self._last_batch[1]

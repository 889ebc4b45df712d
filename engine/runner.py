"""The engine's steps on this rank: chunks of sequences in, one token for each sequence that was computed to its end.

A step is launched first, and collected when its tokens are needed. The next step can be launched before the tokens of the
current one are known: they stay on the device.

On a GPU a decode step is one replay of a CUDA graph, and so is a step with prompt chunks of usual size. A graph contains the
model's kernels, its collectives with their side streams, the head, the drawing of tokens, and for decode steps the copy of the
tokens into the next step's inputs. A step is padded to the next larger bucket; padding rows do nothing. Steps of more than
`LARGEST_GRAPH` tokens run the same code without a graph. On a CPU all steps do, without padding, and the host draws all tokens.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from engine.graphs import Graphs
from engine.logits import SCORE_CHUNK, needs_processing, process, token_logprobs
from engine.paged_cache import PagedCache
from engine.protocol import TokenLogprobs
from engine.sampler import SamplingBatch, sample
from engine.scheduler import Chunk, Sequence
from engine.step_inputs import PINNED, ROUND, Capacity, DecodeInputs, SpanInputs
from kernels.sampling import combine_best, local_best
from model import Transformer

LARGEST_GRAPH = 2048  # tokens; a larger step takes the device longer than the host needs to launch its kernels one by one


def decode_buckets(sequences: int) -> list[int]:
    """Batch sizes that have a graph. Padding rows cost little, because a decode step mostly reads weights."""
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, sequences, 32)]
    return [*(n for n in sizes if n < sequences), sequences]


def prefill_buckets(tokens: int) -> list[int]:
    """Numbers of tokens that have a graph. Large ones are close together, because padding rows take computing time. A
    step with a prompt of a round length also has one row for each decoding sequence, so there is a size just above it."""
    sizes = [16, 64, 128, 192, 256, 320, 384, 512, 576, 768, 1024, 1088, 1280, 1536, 1792, LARGEST_GRAPH]
    largest = min(tokens, LARGEST_GRAPH)
    return [*(n for n in sizes if n < largest), largest]


@dataclass
class StepResult:
    """tokens and logprobs have one entry for each chunk in `chunks` that samples. logprobs are None if not requested."""

    chunks: list[Chunk]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass
class Output:
    """A step's results on the device."""

    hidden: Tensor  # (T, C), all rows
    last: Tensor  # (B, C), the rows from which a token may be drawn
    tokens: Tensor | None  # (B,) int64, drawn with only the logits, the temperature and the seed; None on a CPU


@dataclass
class InFlightStep:
    """A step that was launched; not yet collected while `result` is None. Without `tokens` the host draws them."""

    chunks: list[Chunk]
    sampling: list[Sequence]  # the sequences that get a token, in the same order
    hidden: Tensor  # (len(sampling), C), of their last tokens; a later launch may overwrite it
    drawn: Tensor | None = None  # (len(sampling),) int64 on the device
    tokens: Tensor | None = None  # the same in host memory, valid after `ready`
    ready: "torch.cuda.Event | None" = None
    result: StepResult | None = field(default=None, init=False)


def is_plain(sequence: Sequence) -> bool:
    """Whether the next token depends only on the logits, the temperature and the seed, so that the device can draw it."""
    params = sequence.params
    filtered = params.top_k or params.top_p < 1 or params.min_p
    return not filtered and params.logprobs is None and not params.min_tokens and not needs_processing(sequence)


class Runner:
    def __init__(self, model: Transformer, cache: PagedCache, text_ids: int, capacity: Capacity) -> None:
        """text_ids: how many ids the tokenizer has. The model's vocabulary may be padded; those ids are never drawn."""
        self.model, self.cache, self.text_ids, self.capacity = model, cache, text_ids, capacity
        self.device = cache.keys_values.device
        self.max_length = capacity.blocks * cache.block_size
        self.decode, self.spans = DecodeInputs(capacity, self.device), SpanInputs(capacity, self.device)
        self.graphs = Graphs(self.device) if self.device.type == "cuda" else None
        self._decode_sizes, self._prefill_sizes = decode_buckets(capacity.sequences), prefill_buckets(capacity.rows)
        self._pinned = (
            [torch.zeros(capacity.sequences, dtype=torch.int64, pin_memory=True) for _ in range(PINNED)] if self.graphs else []
        )
        self._turn = 0
        self._last_batch: tuple[list[Sequence], SamplingBatch] | None = None

    # --- what a graph contains -------------------------------------------------------------------------------------------

    def _decode_step(self, rows: int) -> Output:
        """Draw one more token for each of `rows` sequences, and write the inputs of the next decode step."""
        inputs = self.decode
        context = inputs.context(rows, self.cache, self.max_length)
        hidden = self.model.hidden(inputs.tokens[None, :rows], context)[0]
        tokens = self._drawn(hidden, inputs.temperature(rows), inputs.seed[:rows], context.positions + 1)
        inputs.tokens[:rows].copy_(tokens)
        inputs.positions[:rows].add_(inputs.positions[:rows] >= 0)
        return Output(hidden, hidden, tokens)

    def _span_step(self, rows: int, spans: int, max_span: int) -> Output:
        """Compute `rows` tokens of `spans` chunks. On a GPU, also draw a token from each chunk's last row, which is valid only if
        the chunk reaches the end of its sequence."""
        inputs = self.spans
        context = inputs.context(rows, spans, self.cache, max_span)
        hidden = self.model.hidden(inputs.tokens(rows)[None], context)[0]
        last = hidden[inputs.ends(spans)]
        return Output(hidden, last, None if self.graphs is None else self._drawn(last, *inputs.draws(spans)))

    def _drawn(self, hidden: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
        """Draw a token for each row of hidden (B, C): the best of the ranks' candidates from their parts of the vocabulary."""
        model = self.model
        logits = model.head(model.norm(hidden))
        best = local_best(logits, temperature, seed, positions, model.vocab.start, self.text_ids)
        return combine_best(model.comm.all_gather(best))

    # --- graphs ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, quiet: bool = True) -> None:
        """Capture all graphs before requests arrive, the largest first, so that the smaller ones share its memory. Collective."""
        if self.graphs is None:
            return
        for rows in tqdm(self._decode_sizes[::-1], desc="decode graphs", disable=quiet):
            self._capture_decode(self.graphs, rows)
        for rows in tqdm(self._prefill_sizes[::-1], desc="prefill graphs", disable=quiet):
            self._capture_prefill(self.graphs, rows)
        self._try_long_steps()

    def _capture_decode(self, graphs: Graphs, rows: int) -> None:
        if ("decode", rows) not in graphs:
            self.decode.forget()
            self.decode.positions.fill_(-1)
            graphs.capture(("decode", rows), lambda: self._decode_step(rows))

    def _capture_prefill(self, graphs: Graphs, rows: int) -> None:
        if ("prefill", rows) not in graphs:
            self.spans.write([], rows, self.cache.block_size)
            spans = min(rows, self.capacity.sequences)
            graphs.capture(("prefill", rows), lambda: self._span_step(rows, spans, rows))

    def _try_long_steps(self) -> None:
        """Run steps that are too large for a graph, one of each power of two up to the capacity.

        This compiles kernels, and a communicator may measure the fastest algorithm for such all-reduces.
        """
        rows = 2 * LARGEST_GRAPH
        while rows < 2 * self.capacity.rows and self.capacity.rows > LARGEST_GRAPH:
            now = min(rows, self.capacity.rows)
            self.spans.write([], now, self.cache.block_size)
            self._span_step(now, min(now, self.capacity.sequences), now)
            rows *= 2

    # --- steps -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, chunks: List[Chunk], after: InFlightStep | None = None) -> InFlightStep:
        """Start a step. after: only on a GPU, the in-flight step that it follows, if its tokens are not collected yet. The chunks are
        then the tokens which that step draws, one for each of its sequences in the same order."""
        rows = list(range(len(chunks))) if after else [i for i, c in enumerate(chunks) if c.samples]
        sampling = [chunks[i].sequence for i in rows]
        if self.graphs is None:
            output = self._span_step(*self._write_spans(chunks, sum(c.count for c in chunks)))
        elif all(c.count == 1 for c in chunks) and len(rows) == len(chunks):
            output = self._launch_decode(self.graphs, chunks, after)
        else:
            output = self._launch_spans(self.graphs, chunks)
        self._score_prompts(chunks, output.hidden)
        last, drawn = output.last[: len(chunks)], output.tokens
        if len(rows) < len(chunks):
            index = torch.tensor(rows, dtype=torch.int64, device=self.device)
            last, drawn = last[index], None if drawn is None else drawn[index]
        step = InFlightStep(list(chunks), sampling, last)
        if drawn is not None and all(map(is_plain, sampling)):
            self._copy_to_host(step, drawn[: len(rows)])
        return step

    def _launch_decode(self, graphs: Graphs, chunks: List[Chunk], after: InFlightStep | None) -> Output:
        rows = next(n for n in self._decode_sizes if n >= len(chunks))
        self._capture_decode(graphs, rows)
        if after is None or not self.decode.continues(chunks):
            self.decode.write(chunks)
            if after is not None:
                assert after.drawn is not None
                self.decode.tokens[: len(chunks)].copy_(after.drawn)
        self.decode.tables.update([c.sequence.blocks for c in chunks])
        output: Output = graphs.replay(("decode", rows))
        return output

    def _launch_spans(self, graphs: Graphs, chunks: List[Chunk]) -> Output:
        self.decode.forget()
        tokens = sum(c.count for c in chunks)
        rows = next((n for n in self._prefill_sizes if n >= tokens), None)
        if rows is None:
            return self._span_step(*self._write_spans(chunks, -(-tokens // ROUND) * ROUND))
        self._capture_prefill(graphs, rows)
        self._write_spans(chunks, rows)
        output: Output = graphs.replay(("prefill", rows))
        return output

    def _write_spans(self, chunks: List[Chunk], rows: int) -> tuple[int, int, int]:
        """Write the inputs of a step of `rows` rows, padding included. Returns the arguments of `_span_step`."""
        self.spans.write(chunks, rows, self.cache.block_size)
        return rows, len(chunks), max(c.count for c in chunks)

    def _copy_to_host(self, step: InFlightStep, drawn: Tensor) -> None:
        """Start to copy the drawn tokens to the host."""
        self._turn = (self._turn + 1) % len(self._pinned)
        step.drawn, step.tokens = drawn, self._pinned[self._turn][: len(drawn)]
        step.tokens.copy_(drawn, non_blocking=True)
        step.ready = torch.cuda.Event()
        step.ready.record()

    @torch.inference_mode()
    def collect(self, step: InFlightStep) -> StepResult:
        """The step's tokens; waits for the device."""
        if step.result is None and step.tokens is not None and step.ready is not None:
            step.ready.synchronize()
            tokens = step.tokens.tolist()
            step.result = StepResult(step.chunks, tokens, [None] * len(tokens))
        elif step.result is None:
            self.decode.forget()  # its next inputs have the tokens that the device drew, not those that the host will draw
            step.result = self._draw_on_host(step)
        return step.result

    # --- draws with parameters that need the logits ----------------------------------------------------------------------

    def _draw_on_host(self, step: InFlightStep) -> StepResult:
        """Draw the tokens with each request's parameters."""
        if not step.sampling:
            return StepResult(step.chunks, [], [])
        raw = self.model.logits(step.hidden)
        tokens = self._draw(raw, step.sampling)
        return StepResult(step.chunks, tokens, self._logprobs(raw, step.sampling, tokens))

    def _draw(self, raw: Tensor, sequences: list[Sequence]) -> list[int]:
        logits = process(raw, sequences)
        if self.text_ids < logits.shape[-1]:
            logits = logits.clone() if logits is raw else logits
            logits[:, self.text_ids :] = -torch.inf
        positions = torch.tensor([[len(s.tokens)] for s in sequences], device=self.device)
        tokens: list[int] = sample(logits, self._batch(sequences), positions).tolist()  # waits for the device
        return tokens

    def _batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """The sequences' sampling parameters as tensors, kept for the next step, which mostly has the same sequences."""
        if self._last_batch is None or self._last_batch[0] != sequences:  # compares objects: a request id may be used again
            self._last_batch = sequences, SamplingBatch.of([s.params for s in sequences], self.device)
        return self._last_batch[1]

    def _logprobs(self, raw: Tensor, sequences: list[Sequence], tokens: list[int]) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(sequences)
        rows = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
        if rows:
            tops = [sequences[i].params.logprobs or 0 for i in rows]
            for i, entry in zip(rows, token_logprobs(raw[rows], [tokens[i] for i in rows], tops), strict=True):
                result[i] = entry
        return result

    def _score_prompts(self, chunks: List[Chunk], hidden: Tensor) -> None:
        """Add log-probabilities of the prompt tokens that this step's chunks predict, for sequences that request them."""
        first = 0
        for chunk in chunks:
            sequence, row, first = chunk.sequence, first, first + chunk.count
            if sequence.params.prompt_logprobs is None or chunk.start >= sequence.prompt_length:
                continue
            known = sequence.state.prompt_logprobs
            if not known:
                known.append(None)  # nothing comes before the first token
            targets = sequence.tokens[len(known) : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
            begin = row + len(known) - 1 - chunk.start  # after a preemption, part of the chunk may be scored already
            for i in range(0, len(targets), SCORE_CHUNK):  # the logits of a whole prompt would take too much memory
                part = targets[i : i + SCORE_CHUNK]
                logits = self.model.logits(hidden[begin + i : begin + i + len(part)])
                known += token_logprobs(logits, part, [sequence.params.prompt_logprobs] * len(part))

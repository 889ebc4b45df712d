"""The runner for GPUs: a decode step is one replay of a CUDA graph, and so is a step with prompt chunks of usual size.

A graph contains the model's kernels, its collectives with their side streams, the head, the drawing of tokens, and for
decode steps the copy of the tokens into the next step's inputs. A step is padded to the next larger bucket; padding
rows do nothing. Steps of more than `LARGEST_GRAPH` tokens run the same code without a graph.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from engine.paged_cache import PagedCache
from engine.runner import Flight, Runner, StepResult, is_plain
from engine.scheduler import Chunk
from engine.step_inputs import PINNED, ROUND, DecodeContext, DecodeInputs, Draws, SpanContext, SpanInputs
from engine.step_inputs import Capacity as Capacity
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
class Output:
    """A step's results on the device."""

    hidden: Tensor  # (T, C), all rows
    last: Tensor  # (B, C), the rows from which a token may be drawn
    tokens: Tensor  # (B,) int64, drawn with only the logits, the temperature and the seed


@dataclass
class Graph:
    replay: Callable[[], None]
    output: Output


@dataclass
class GraphFlight(Flight):
    """An in-flight step. The fields are None if a request's parameters need the logits, so that the host has to draw."""

    drawn: Tensor | None = None  # (B,) int64 on the device
    tokens: Tensor | None = None  # the same in pinned host memory, valid after `ready`
    ready: "torch.cuda.Event | None" = None


class GraphRunner(Runner):
    def __init__(self, model: Transformer, cache: PagedCache, text_ids: int, capacity: Capacity) -> None:
        super().__init__(model, cache, text_ids)
        self.capacity, self.max_length = capacity, capacity.blocks * cache.block_size
        self.decode, self.spans = DecodeInputs(capacity, self.device), SpanInputs(capacity, self.device)
        pinned = self.device.type == "cuda"
        self._pinned = [torch.zeros(capacity.sequences, dtype=torch.int64, pin_memory=pinned) for _ in range(PINNED)]
        self._turn = 0
        self._decode_sizes, self._prefill_sizes = decode_buckets(capacity.sequences), prefill_buckets(capacity.rows)
        self._decode_graphs: dict[int, Graph] = {}
        self._prefill_graphs: dict[int, Graph] = {}
        self._pool, self._capturing = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)

    # --- the captured code -----------------------------------------------------------------------------------------------

    def _decode_step(self, rows: int) -> Output:
        """Draw one more token for each of `rows` rows, and write the inputs of the next decode step."""
        inputs = self.decode
        context = DecodeContext(inputs, rows, self.cache, self.max_length)
        hidden = self.model.hidden(inputs.tokens[None, :rows], context)[0]
        tokens = self._drawn(hidden, inputs.draws(rows), context.positions + 1)
        inputs.tokens[:rows].copy_(tokens)
        inputs.positions[:rows].add_(inputs.positions[:rows] >= 0)
        return Output(hidden, hidden, tokens)

    def _span_step(self, rows: int, spans: int, max_span: int) -> Output:
        """Compute `rows` tokens of `spans` chunks and draw a token from each chunk's last row.

        The token is valid only if the chunk reaches the end of its sequence.
        """
        inputs = self.spans
        context = SpanContext(inputs, rows, spans, self.cache, max_span)
        hidden = self.model.hidden(inputs.tokens(rows)[None], context)[0]
        last = hidden[inputs.ends(spans)]
        return Output(hidden, last, self._drawn(last, *inputs.draws(spans)))

    def _drawn(self, hidden: Tensor, draws: Draws, positions: Tensor) -> Tensor:
        """Draw a token for each row of hidden (B, C): the best of the ranks' candidates from their parts of the vocabulary."""
        model = self.model
        logits = model.head(model.norm(hidden))
        best = local_best(logits, draws.temperature, draws.seed, positions, model.vocab.start, self.text_ids)
        return combine_best(model.comm.all_gather(best))

    @torch.inference_mode()
    def capture(self, quiet: bool = True) -> None:
        """Capture all graphs, the largest first, so that the smaller ones share its memory. Collective."""
        for rows in tqdm(self._decode_sizes[::-1], desc="decode graphs", disable=quiet):
            self._decode_graph(rows)
        for rows in tqdm(self._prefill_sizes[::-1], desc="prefill graphs", disable=quiet):
            self._prefill_graph(rows)
        self._try_long_steps()

    def _try_long_steps(self) -> None:
        """Run steps that are too large for a graph, one of each power of two up to the capacity, before requests arrive.

        This compiles kernels, and a communicator may measure the fastest algorithm for such all-reduces.
        """
        rows = 2 * LARGEST_GRAPH
        while rows < 2 * self.capacity.rows and self.capacity.rows > LARGEST_GRAPH:
            now = min(rows, self.capacity.rows)
            self.spans.write([], now, self.cache.block_size)
            self._span_step(now, min(now, self.capacity.sequences), now)
            rows *= 2

    def _decode_graph(self, rows: int) -> Graph:
        if rows not in self._decode_graphs:
            self.decode.forget()
            self.decode.positions.fill_(-1)
            self._decode_graphs[rows] = self._captured(lambda: self._decode_step(rows))
        return self._decode_graphs[rows]

    def _prefill_graph(self, rows: int) -> Graph:
        if rows not in self._prefill_graphs:
            self.spans.write([], rows, self.cache.block_size)
            spans = min(rows, self.capacity.sequences)
            self._prefill_graphs[rows] = self._captured(lambda: self._span_step(rows, spans, rows))
        return self._prefill_graphs[rows]

    def _captured(self, step: Callable[[], Output]) -> Graph:
        """Capture `step`. `torch.cuda.graph` would first collect garbage, which takes longer than the capture."""
        step()  # compiles kernels, opens connections
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capturing):
            # other threads, such as NCCL's watchdog, may call CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            output = step()
            graph.capture_end()
        return Graph(graph.replay, output)

    # --- steps -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, chunks: List[Chunk], after: Flight | None = None) -> GraphFlight:
        decode = all(c.count == 1 for c in chunks) and (after is not None or all(c.samples for c in chunks))
        output = self._launch_decode(chunks, after) if decode else self._launch_spans(chunks)
        rows = range(len(chunks)) if after else [i for i, c in enumerate(chunks) if c.samples]
        sampling = [chunks[i].sequence for i in rows]
        self.score_prompts(chunks, output.hidden)
        everyone = len(rows) == len(chunks)
        last, drawn = output.last[: len(chunks)], output.tokens[: len(chunks)]
        if not everyone:
            index = torch.tensor(rows, dtype=torch.int64, device=self.device)
            last, drawn = last[index], drawn[index]
        flight = GraphFlight(list(chunks), sampling, last)
        if all(map(is_plain, sampling)):
            self._send_home(flight, drawn)
        return flight

    def _launch_decode(self, chunks: List[Chunk], after: Flight | None) -> Output:
        rows = next(n for n in self._decode_sizes if n >= len(chunks))
        graph = self._decode_graph(rows)
        if after is None or not self.decode.continues(chunks):
            self.decode.write(chunks)
            if after is not None:
                assert isinstance(after, GraphFlight) and after.drawn is not None
                self.decode.tokens[: len(chunks)].copy_(after.drawn)
        self.decode.tables.update([c.sequence.blocks for c in chunks])
        graph.replay()
        return graph.output

    def _launch_spans(self, chunks: List[Chunk]) -> Output:
        self.decode.forget()
        tokens = sum(c.count for c in chunks)
        rows = next((n for n in self._prefill_sizes if n >= tokens), None)
        if rows is None:
            rows = -(-tokens // ROUND) * ROUND
            self.spans.write(chunks, rows, self.cache.block_size)
            return self._span_step(rows, len(chunks), max(c.count for c in chunks))
        graph = self._prefill_graph(rows)
        self.spans.write(chunks, rows, self.cache.block_size)
        graph.replay()
        return graph.output

    def _send_home(self, flight: GraphFlight, drawn: Tensor) -> None:
        """Start to copy the drawn tokens to the host."""
        self._turn = (self._turn + 1) % len(self._pinned)
        flight.drawn, flight.tokens = drawn, self._pinned[self._turn][: len(drawn)]
        flight.tokens.copy_(drawn, non_blocking=True)
        flight.ready = torch.cuda.Event()
        flight.ready.record()

    @torch.inference_mode()
    def collect(self, flight: Flight) -> StepResult:
        assert isinstance(flight, GraphFlight)
        if flight.result is None and flight.ready is not None and flight.tokens is not None:
            flight.ready.synchronize()
            tokens = flight.tokens.tolist()
            flight.result = StepResult(flight.chunks, tokens, [None] * len(tokens))
        elif flight.result is None:
            self.decode.forget()  # its next inputs have the tokens that the device drew, not those that the host will draw
        return super().collect(flight)


def build_runner(model: Transformer, cache: PagedCache, text_ids: int, capacity: Capacity) -> Runner:
    """The runner for the cache's device. Collective."""
    if cache.keys_values.device.type != "cuda":
        return Runner(model, cache, text_ids)
    log = logging.getLogger("rung")
    log.info("start-up: cache")
    runner = GraphRunner(model, cache, text_ids, capacity)
    runner.capture()
    log.info("start-up: graphs")
    return runner

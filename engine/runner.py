"""The engine's steps on this rank: chunks of sequences in, one token for each sequence that was computed to its end.

A step is launched first, and collected when its tokens are needed. `Runner` computes with PyTorch only, on any device.
The runner in `graph_runner.py` replays CUDA graphs, and can launch the next step before the tokens of the current one
are known.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.logits import SCORE_CHUNK, needs_processing, process, token_logprobs
from engine.paged_cache import PagedCache
from engine.protocol import RequestParams, TokenLogprobs
from engine.sampler import SamplingBatch, SamplingParams, sample
from engine.scheduler import Chunk, Sequence
from model import Transformer


@dataclass
class StepResult:
    """tokens and logprobs have one entry for each chunk in `chunks` that samples. logprobs are None if not requested."""

    chunks: list[Chunk]  # in the order of the step
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass
class Flight:
    """An in-flight step: launched, and not yet collected while `result` is None."""

    chunks: list[Chunk]  # in the order of the step
    sampling: list[Sequence]  # the sequences that get a token, in the same order
    hidden: Tensor  # (len(sampling), C), of their last tokens; a later launch may overwrite it
    result: StepResult | None = field(default=None, init=False)


def is_plain(sequence: Sequence) -> bool:
    """Whether the next token depends only on the logits, the temperature and the seed, so that a CUDA graph can draw it."""
    params: RequestParams = sequence.params
    filtered = params.top_k or params.top_p < 1 or params.min_p
    return not filtered and params.logprobs is None and not params.min_tokens and not needs_processing(sequence)


class Runner:
    def __init__(self, model: Transformer, cache: PagedCache, text_ids: int) -> None:
        """text_ids: how many ids the tokenizer has. The model's vocabulary may be padded; those ids are never drawn."""
        self.model, self.cache, self.text_ids = model, cache, text_ids
        self.device = cache.keys_values.device
        self._last_batch: tuple[list[Sequence], SamplingBatch] | None = None

    @torch.inference_mode()
    def launch(self, chunks: List[Chunk], after: Flight | None = None) -> Flight:
        """Start a step. after: the in-flight step that it follows. The chunks are then the tokens which that step draws,
        one for each of its sequences in the same order."""
        fed = None if after is None else self.collect(after).tokens
        step = self.cache.step(chunks, fed)
        hidden = self.model.hidden(step.tokens, step)[0]  # (T, C)
        self.score_prompts(step.order, hidden)
        return Flight(step.order, *self.last_rows(step.order, hidden, ahead=after is not None))

    @torch.inference_mode()
    def collect(self, flight: Flight) -> StepResult:
        """The step's tokens; waits for the device."""
        if flight.result is None:
            flight.result = self.draw_rows(flight)
        return flight.result

    def last_rows(self, order: List[Chunk], hidden: Tensor, ahead: bool) -> tuple[list[Sequence], Tensor]:
        """The sequences that get a token, and their rows of hidden (T, C). In a step `ahead`, all sequences get one."""
        ends, first = [], 0
        for chunk in order:
            first += chunk.count
            if ahead or chunk.samples:
                ends.append(first - 1)
        sampling = [c.sequence for c in order if ahead or c.samples]
        return sampling, hidden if len(ends) == len(hidden) else hidden[
            torch.tensor(ends, device=self.device, dtype=torch.int64)
        ]

    def draw_rows(self, flight: Flight) -> StepResult:
        """Draw the tokens with each request's parameters."""
        if not flight.sampling:
            return StepResult(flight.chunks, [], [])
        raw = self.model.logits(flight.hidden)
        tokens = self._draw(raw, flight.sampling)
        return StepResult(flight.chunks, tokens, self._logprobs(raw, flight.sampling, tokens))

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
            params = [
                SamplingParams(s.params.temperature, s.params.top_k, s.params.top_p, s.params.min_p, s.params.seed)
                for s in sequences
            ]
            self._last_batch = sequences, SamplingBatch.of(params, self.device)
        return self._last_batch[1]

    def _logprobs(self, raw: Tensor, sequences: list[Sequence], tokens: list[int]) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(sequences)
        rows = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
        if rows:
            tops = [sequences[i].params.logprobs or 0 for i in rows]
            for i, entry in zip(rows, token_logprobs(raw[rows], [tokens[i] for i in rows], tops), strict=True):
                result[i] = entry
        return result

    def score_prompts(self, order: List[Chunk], hidden: Tensor) -> None:
        """Add log-probabilities of the prompt tokens that this step's chunks predict, for sequences that request them."""
        first = 0
        for chunk in order:
            sequence, here, first = chunk.sequence, first, first + chunk.count
            if sequence.params.prompt_logprobs is None or chunk.start >= sequence.prompt_length:
                continue
            known = sequence.state.prompt_logprobs
            if not known:
                known.append(None)  # nothing comes before the first token
            targets = sequence.tokens[len(known) : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
            begin = here + len(known) - 1 - chunk.start  # after a preemption, part of the chunk may be scored already
            for i in range(0, len(targets), SCORE_CHUNK):  # the logits of a whole prompt would take too much memory
                part = targets[i : i + SCORE_CHUNK]
                logits = self.model.logits(hidden[begin + i : begin + i + len(part)])
                known += token_logprobs(logits, part, [sequence.params.prompt_logprobs] * len(part))

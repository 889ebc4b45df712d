"""One step of the engine on this rank: chunks of sequences in, one token for each sequence that reached its end.

This is where CPU and GPU may differ; scheduler, cache and sampling are shared.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.logits import process, token_logprobs
from engine.offline import SCORE_CHUNK
from engine.paged_cache import PagedCache, PagedStep
from engine.protocol import TokenLogprobs
from engine.sampler import SamplingBatch, SamplingParams, sample
from engine.scheduler import Chunk, Sequence
from model import Transformer


@dataclass
class StepResult:
    """tokens and logprobs: one entry for each chunk of `chunks` that samples; logprobs None where not asked for."""

    chunks: list[Chunk]  # in the order of the step
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Runner:
    def __init__(self, model: Transformer, cache: PagedCache, text_ids: int) -> None:
        """text_ids: how many ids the tokenizer knows; a model's vocabulary may be padded beyond, and those are never drawn."""
        self.model, self.cache, self.text_ids = model, cache, text_ids
        self.device = cache.keys_values.device
        self._last_batch: tuple[list[Sequence], SamplingBatch] | None = None

    @torch.inference_mode()
    def run(self, chunks: List[Chunk]) -> StepResult:
        step = self.cache.step(chunks)
        hidden = self.model.hidden(step.tokens, step)[0]  # (T, C)
        self._score_prompts(step, hidden)
        ends, first = [], 0
        for chunk in step.order:
            first += chunk.count
            if chunk.samples:
                ends.append(first - 1)
        sampling = [c.sequence for c in step.order if c.samples]
        if not sampling:
            return StepResult(step.order, [], [])
        raw = self.model.logits(hidden[torch.tensor(ends, device=self.device)])
        tokens = self._draw(raw, sampling)
        return StepResult(step.order, tokens, self._logprobs(raw, sampling, tokens))

    def _draw(self, raw: Tensor, sequences: list[Sequence]) -> list[int]:
        logits = process(raw, sequences)
        if self.text_ids < logits.shape[-1]:
            logits = logits.clone() if logits is raw else logits
            logits[:, self.text_ids :] = -torch.inf
        positions = torch.tensor([[len(s.tokens)] for s in sequences], device=self.device)
        tokens: list[int] = sample(logits, self._batch(sequences), positions).tolist()  # waits for the device
        return tokens

    def _batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """The sequences' sampling parameters as tensors; most steps have the same sequences as the one before."""
        if self._last_batch is None or self._last_batch[0] != sequences:  # the same objects: an id may come again
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

    def _score_prompts(self, step: PagedStep, hidden: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that this step's chunks predict, for the sequences that ask for them."""
        first = 0
        for chunk in step.order:
            sequence, here, first = chunk.sequence, first, first + chunk.count
            if sequence.params.prompt_logprobs is None or chunk.start >= sequence.prompt_length:
                continue
            known = sequence.state.prompt_logprobs
            if not known:
                known.append(None)  # nothing comes before the first token
            targets = sequence.tokens[len(known) : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
            begin = here + len(known) - 1 - chunk.start  # after a preemption, part of the chunk is scored already
            for i in range(0, len(targets), SCORE_CHUNK):  # not the logits of a whole prompt at once
                part = targets[i : i + SCORE_CHUNK]
                logits = self.model.logits(hidden[begin + i : begin + i + len(part)])
                known += token_logprobs(logits, part, [sequence.params.prompt_logprobs] * len(part))

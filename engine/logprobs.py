"""Log-probabilities of drawn tokens and of prompts, for requests that ask for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import Logprob, TokenLogprobs
from engine.sequence import Chunk
from engine.transfers import to_device, to_host
from kernels import determinism
from kernels.sampling import log_softmax

SCORE_CHUNK = 512  # tokens whose logits are held at once while scoring


def scores_prompt(chunk: Chunk) -> bool:
    """Whether log-probabilities of prompt tokens are read from the chunk's rows."""
    return chunk.sequence.params.prompt_logprobs is not None and chunk.start < chunk.sequence.prompt_length


def score_prompts(logits_of: Callable[[Tensor], Tensor], chunks: list[Chunk], hidden: Tensor) -> None:
    """Add log-probabilities of the prompt tokens that a step's chunks predict, for sequences that request them. logits_of: hidden states
    (n, C) to logits (n, V). hidden: (T, C), of all rows."""
    first = 0
    for chunk in chunks:
        sequence, row, first = chunk.sequence, first, first + chunk.count
        if not scores_prompt(chunk):
            continue
        known = sequence.state.prompt_logprobs
        if not known:
            known.append(None)  # nothing comes before the first token
        targets = sequence.tokens[len(known) : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
        begin = row + len(known) - 1 - chunk.start  # after a preemption, part of the chunk may be scored already
        for i in range(0, len(targets), SCORE_CHUNK):  # the logits of a whole prompt would take too much memory
            part = targets[i : i + SCORE_CHUNK]
            logits = logits_of(hidden[begin + i : begin + i + len(part)])
            scores = token_logprobs(logits, part, [sequence.params.prompt_logprobs or 0] * len(part))
            sequence.state.overflowed |= not all(scores.finite())
            known += scores.read()


def token_logprobs(logits: Tensor, chosen: list[int], tops: list[int]) -> "PendingLogprobs":
    """Log-probabilities of `chosen[i]` and of the `tops[i]` likeliest tokens, for each row i of raw (B, V) fp32 logits. Valid now."""
    scores = PendingLogprobs.of(logits, to_device(chosen, torch.int64, logits.device), tops)
    if logits.is_cuda:
        torch.cuda.current_stream().synchronize()
    return scores


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities of B tokens and of the likeliest ones, on their way to the host: valid as `to_host` says."""

    chosen: tuple[Tensor, Tensor, Tensor]  # ids, log-probabilities and ranks, each (B,)
    best: tuple[Tensor, Tensor]  # log-probabilities and ids of the likeliest tokens, (B, most)
    tops: list[int]

    @classmethod
    def of(cls, logits: Tensor, chosen: Tensor, tops: list[int]) -> "PendingLogprobs":
        """logits: raw (B, V) fp32. chosen: ids (B,), or NO_TOKEN. tops: how many of the likeliest tokens each row needs."""
        logprobs, chosen = log_softmax(logits), chosen.clamp(min=0)
        mine = logprobs.gather(-1, chosen[:, None])
        ranks = (logprobs > mine).sum(-1) + 1
        most = max(1, min(max(tops), logits.shape[-1]))
        if determinism.enabled():  # of equal values, topk takes others if another request asks for more of them
            values, ids = (x[:, :most] for x in logprobs.sort(dim=-1, descending=True, stable=True))
        else:
            values, ids = logprobs.topk(most, dim=-1)
        return cls((to_host(chosen), to_host(mine[:, 0]), to_host(ranks)), (to_host(values), to_host(ids)), tops)

    def finite(self) -> list[bool]:
        """For each row, whether all its log-probabilities are finite."""
        best = self.best[0]
        hidden = torch.arange(best.shape[1]) >= torch.tensor(self.tops)[:, None]
        finite: list[bool] = (self.chosen[1].isfinite() & (best.isfinite() | hidden).all(-1)).tolist()
        return finite

    def read(self) -> list[TokenLogprobs]:
        rows = zip(*(x.tolist() for x in (*self.chosen, *self.best)), self.tops, strict=True)
        return [
            TokenLogprobs(
                Logprob(token, logprob, rank),
                [Logprob(i, v, n + 1) for n, (i, v) in enumerate(zip(best_ids, best, strict=True))][:top],
            )
            for token, logprob, rank, best, best_ids, top in rows
        ]

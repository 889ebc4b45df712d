"""From hidden states and logits to tokens and vectors: log-probabilities, embeddings, changes by a request's parameters, and draws
with temperature, top-k, top-p and min-p, seeded per sequence and vectorized over the batch.

Filters apply to the distribution after temperature: top-k, then top-p, then min-p. Parameters are fp32 values. Top-p adds
probabilities as whole multiples of 2^-60, because the order in which a GPU adds fp32 values depends on the batch. min_p is
compared as a logarithm, log p_i >= log p_max + log(min_p), because the logarithm of any positive min_p can be represented: 1e-84
drops tokens more than 193.4 below the largest logit / temperature. A top_p that fp32 rounds to 1 filters nothing. A temperature
above 0 and below 1e-6 counts as 1e-6, or as 0 if fp32 rounds it to 0.

The noise is a hash of (seed, position, token id), not the state of a generator, so a sequence draws the same tokens
alone, in any batch, and on every rank. Sampling uses the Gumbel-max trick, which needs one number for each token id.
"""

import math
from collections import abc
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.grammars import Digits
from engine.protocol import Logprob, SamplingParams, TokenLogprobs
from engine.sequence import Chunk, Draw, Sequence
from engine.step_inputs import to_device, to_host
from engine.thinking import Thinking
from errors import UserError
from kernels import determinism
from kernels.sampling import NO_TOKEN, gumbel_noise, log_softmax, softmax
from text.tokenizer import Tokenizer

# --- log-probabilities, for requests that ask for them -----------------------------------------------------------------------


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


# --- embeddings: hidden states of a prompt's tokens, after the final norm, pooled to one vector -------------------------------
#
# A mean is accumulated over the chunks of the prompt. The sum is in fixed point, whose additions are exact: it has the same bits
# however the prompt is cut into chunks and whatever else is in a step. A last column counts the rows that have no such sum, because
# a number is not finite or too large.


ONE = 2.0**32  # in fixed point: an error of 2^-33 a token, and sums of up to 2^31
LARGEST = 2.0**12  # of a value, so that the sum of 2^19 tokens is exact
Norm = Callable[[Tensor], Tensor]
PIECE = 512  # rows that are converted at once; those of a whole step would take too much memory


class Pooled(NamedTuple):
    """vectors: (S, C) fp32 in host memory, of the sequences whose prompts end in a step, valid as `to_host` says."""

    sequences: list[Sequence]
    vectors: Tensor


def reads_all_rows(chunk: Chunk) -> bool:
    """Whether the hidden states of all the chunk's tokens are needed."""
    return chunk.sequence.params.pooling == "mean"


def pool(norm: Norm, chunks: list[Chunk], last: Tensor, hidden: Tensor | None) -> Pooled | None:
    """Pool a step's hidden states, for the sequences that ask for it. None if no such sequence ends.

    norm: the model's final one. last: (W, C), the W rows that draw. hidden: (T, C), all rows, if any chunk `reads_all_rows`.
    """
    if any(map(reads_all_rows, chunks)):
        assert hidden is not None
        _add_up(norm, chunks, hidden)
    ended, rows, row = list[Chunk](), list[int](), 0
    for chunk in chunks:
        if chunk.samples and chunk.sequence.params.pooling is not None:
            ended.append(chunk)
            rows.append(row)
        row += (1 + len(chunk.draft)) * chunk.samples
    if not ended:
        return None
    vectors = norm(last[to_device(rows, torch.int64, last.device)]).float()
    for i, chunk in enumerate(ended):
        if reads_all_rows(chunk):
            *sums, overflowed = chunk.sequence.state.pooled.split([vectors.shape[-1], 1])
            vectors[i] = (sums[0] / (ONE * chunk.stop)).masked_fill(overflowed > 0, torch.nan)
            chunk.sequence.state.pooled = None
    return Pooled([chunk.sequence for chunk in ended], to_host(vectors))


def _add_up(norm: Norm, chunks: list[Chunk], hidden: Tensor) -> None:
    """Add the rows of chunks to the sums of their sequences. A sequence's first chunk begins a new sum, also after a preemption."""
    places = [place for place, chunk in enumerate(chunks) for _ in range(chunk.count)]
    segments = to_device(places, torch.int64, hidden.device)
    sums = torch.zeros(len(chunks), hidden.shape[-1] + 1, dtype=torch.int64, device=hidden.device)
    for first in range(0, len(places), PIECE):
        part = segments[first : first + PIECE]
        normed = norm(hidden[first : first + len(part)])
        fits = (normed.abs() < LARGEST).all(-1, keepdim=True)  # false for NaN
        fixed = (normed.double() * ONE).round_().masked_fill_(~fits, 0).long()
        sums.index_add_(0, part, torch.cat([fixed, (~fits).long()], dim=-1))
    for chunk, own in zip(chunks, sums, strict=True):
        if reads_all_rows(chunk):
            state = chunk.sequence.state
            state.pooled = own if chunk.start == 0 else state.pooled + own


# --- changes of logits before a token is drawn -------------------------------------------------------------------------------
#
# By a request's parameters: penalties, biases, allowed ids, banned sequences, minimum length, the end of reasoning, grammars. Rows of
# requests without any of these stay unchanged.


@dataclass
class SamplingState:
    """One sequence's state of sampling between steps. Tensors are (V,), on the model's device."""

    # `prompt`, `counts`, `matcher` and `thinking` are created at the first draw, so that waiting requests take no memory for them
    prompt: Tensor | None = None  # bool: ids that occur in the prompt
    counts: Tensor | None = None  # fp32: how often each id was generated
    counted: int = 0  # how many generated tokens `counts` holds, with those that steps in flight draw
    bias: Tensor | None = None  # fp32: logit_bias, and -inf outside allowed_token_ids and for single banned tokens
    banned: dict[int, list[list[int]]] = field(default_factory=dict)  # of several tokens, by the last but one
    longest_banned: int = 0
    tokenizer: Tokenizer | None = None
    thinking: Thinking | None = None
    grammar: Any = None  # llguidance's matcher in its initial state, shared and never advanced; None for free text
    matcher: Any = None  # this sequence's copy of it, which may take megabytes
    digits: Digits | None = None  # bounds those of a JSON grammar's numbers
    again: int = -1  # the last position whose token a late grammar has forbidden, so that it is drawn with the mask
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    overflowed: bool = False  # whether some of these are not finite
    pooled: Tensor | None = None  # (C,) int64, see `pool`: the sum of the hidden states so far


def new_state(
    params: SamplingParams, vocab_size: int, device: torch.device, tokenizer: Tokenizer | None = None
) -> SamplingState:
    """A request's initial state, without its grammar. tokenizer: for `thinking`. Raises UserError for ids outside the vocabulary."""
    state = SamplingState(tokenizer=tokenizer)
    if params.thinking is not None:
        if tokenizer is None:
            raise UserError("this model has no tokenizer, so its reasoning cannot be found")
        check_ids(params.thinking.end_ids, vocab_size)
    check_ids([*params.logit_bias, *(params.allowed_token_ids or ()), *params.stop_token_ids, *params.prediction], vocab_size)
    check_ids([i for ids in params.banned for i in ids], vocab_size)
    if params.allowed_token_ids is not None:
        state.bias = torch.full((vocab_size,), -torch.inf, device=device)
        state.bias[torch.tensor(params.allowed_token_ids, device=device, dtype=torch.int64)] = 0
    if params.logit_bias:
        if state.bias is None:
            state.bias = torch.zeros(vocab_size, device=device)
        state.bias[torch.tensor(list(params.logit_bias), device=device)] += torch.tensor(
            list(params.logit_bias.values()), device=device
        )
    if single := [ids[0] for ids in params.banned if len(ids) == 1]:
        if state.bias is None:
            state.bias = torch.zeros(vocab_size, device=device)
        state.bias[torch.tensor(single, device=device)] = -torch.inf
    for ids in params.banned:
        if len(ids) > 1:
            state.banned.setdefault(ids[-2], []).append(list(ids))
            state.longest_banned = max(state.longest_banned, len(ids))
    return state


def sibling(state: SamplingState) -> SamplingState:
    """A new state for another sequence with the same parameters. It shares what never changes."""
    return SamplingState(bias=state.bias, banned=state.banned, longest_banned=state.longest_banned, tokenizer=state.tokenizer)


def check_ids(ids: abc.Sequence[int], vocab_size: int) -> None:
    """Raises UserError for an id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        outside = next(i for i in ids if not 0 <= i < vocab_size)
        raise UserError(f"token id {outside} is outside the model's vocabulary of {vocab_size}; use ids 0 to {vocab_size - 1}")


def process(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Apply each sequence's parameters to its rows of (B, V) fp32 logits. Returns a new tensor if any row changes. Where a draw
    `reads_tokens`, none before it may be unknown, but for those of its draft."""
    rows = [i for i, draw in enumerate(draws) if needs_processing(draw.sequence) or _is_too_short(draw)]
    if not rows:
        return logits
    raw, logits = logits, logits.clone()
    for draw in [draws[i] for i in rows if draws[i].position == draws[i].sequence.state.again]:
        draw.sequence.state.counts, draw.sequence.state.counted = None, 0  # they hold the forbidden token
    _penalize(logits, [i for i in rows if is_penalized(draws[i].sequence.params)], draws)
    _ban(logits, rows, draws)
    masks: list[_Mask] = []
    for i in rows:
        sequence, state = draws[i].sequence, draws[i].sequence.state
        if state.bias is not None:
            logits[i] += state.bias
        too_short = _is_too_short(draws[i])
        if too_short:
            logits[i].index_fill_(0, to_device(sequence.params.stop_token_ids, torch.int64, logits.device), -torch.inf)
        if (end := _forced_end(draws[i])) is not None:
            logits[i] = -torch.inf
            logits[i, end] = raw[i, end]
        masked = not sequence.params.late_grammar or draws[i].position == state.again
        matcher = _behind(_matcher(sequence), draws[i].draft) if masked else None
        if matcher is not None:
            packed = _packed(sequence, matcher, draws[i].draft)
            if sequence.params.grammar_optional and matcher.is_error():
                continue
            stops = sequence.params.stop_token_ids if _may_stop(sequence, matcher) else ()
            masks.append(_Mask(i, packed, stops, bool(state.bias is not None or state.banned or too_short or end is not None)))
    if masks:
        _mask(logits, raw, masks)
    return logits


def _packed(sequence: Sequence, matcher: Any, draft: abc.Sequence[int] = ()) -> bytes:
    """What the grammar allows behind the sequence and the draft: a bit for each token id."""
    packed: bytes = matcher.compute_bitmask()
    digits = sequence.state.digits
    return packed if digits is None else digits.bound([*sequence.tokens[sequence.prompt_length :], *draft], packed)


class _Mask(NamedTuple):
    """What a grammar allows in a row. packed: a bit for each token id. stops: ids that are allowed, too. ruled: other rules ban tokens."""

    row: int
    packed: bytes
    stops: abc.Sequence[int]
    ruled: bool


def _mask(logits: Tensor, raw: Tensor, masks: list[_Mask]) -> None:
    """Apply the masks of grammars to their rows, in place. Where the other rules ban all tokens that a grammar allows, it alone applies.
    raw: (B, V), the logits before any rule."""
    rows = to_device([mask.row for mask in masks], torch.int64, logits.device)
    banned = ~_unpacked([mask.packed for mask in masks], logits)
    if stops := [(i, token) for i, mask in enumerate(masks) for token in mask.stops]:
        places = to_device(stops, torch.int64, logits.device)
        banned[places[:, 0], places[:, 1]] = False
    chosen = logits[rows]
    if any(mask.ruled for mask in masks):
        none_left = (chosen.isneginf() | banned).all(-1, keepdim=True)
        chosen = torch.where(none_left, raw[rows], chosen)
    logits[rows] = chosen.masked_fill_(banned, -torch.inf)


def _unpacked(packed: list[bytes], logits: Tensor) -> Tensor:
    """(B, V) bool on the device of `logits` (_, V): the bits of each mask, the lowest of a byte first; false beyond them."""
    host = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8).view(len(packed), -1)
    bits = (host.pin_memory() if logits.is_cuda else host).to(logits.device, non_blocking=True)
    bits = (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    bits = bits.view(len(packed), -1)[:, : logits.shape[-1]].bool()
    return torch.nn.functional.pad(bits, (0, logits.shape[-1] - bits.shape[-1]))


def is_penalized(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def needs_processing(sequence: Sequence) -> bool:
    """Whether the logits of each of its tokens change. Nobody reads the tokens of a sequence that has ended."""
    changes = is_penalized(sequence.params) or sequence.state.bias is not None or reads_tokens(sequence)
    return changes and sequence.finish_reason is None


def may_change(sequence: Sequence) -> bool:
    """Whether the logits of some of its tokens change."""
    return bool(sequence.params.min_tokens or sequence.params.late_grammar) or needs_processing(sequence)


def reads_tokens(sequence: Sequence) -> bool:
    """Whether its next draw needs the tokens before it on the host."""
    state = sequence.state
    thinks = sequence.params.thinking is not None and (state.thinking is None or state.thinking.is_open)
    return has_grammar(sequence) or bool(state.banned) or thinks


def has_grammar(sequence: Sequence) -> bool:
    """Whether a grammar masks its next draw."""
    state = sequence.state
    if sequence.params.late_grammar and state.again < len(sequence.tokens):
        return False
    return state.grammar is not None or state.matcher is not None


def _matcher(sequence: Sequence) -> Any:
    """The sequence's matcher, behind all its tokens; None without a grammar."""
    state = sequence.state
    if state.matcher is None and state.grammar is not None:
        state.matcher = state.grammar.deep_copy()
        state.matcher.consume_tokens(sequence.tokens[sequence.prompt_length :])  # of a Submit; mostly none
    return state.matcher


def _may_stop(sequence: Sequence, matcher: Any) -> bool:
    """Whether all stop tokens may end the text here. Of these, grammars know EOS alone."""
    return bool(sequence.params.late_grammar and matcher.is_accepting())


def _is_too_short(draw: Draw) -> bool:
    """Whether the sequence may not end with this token."""
    params = draw.sequence.params
    if not params.min_tokens or not params.stop_token_ids:
        return False
    return draw.generated < params.min_tokens and draw.sequence.finish_reason is None


def _forced_end(draw: Draw) -> int | None:
    """The token of the reasoning's end that must be drawn; None: another may be."""
    sequence, state = draw.sequence, draw.sequence.state
    if sequence.params.thinking is None:
        return None
    if state.thinking is None:
        state.thinking = Thinking(sequence.params.thinking, state.tokenizer)
    state.thinking.read(sequence.tokens[sequence.prompt_length + state.thinking.seen :])
    thinking = state.thinking
    if draw.draft and thinking.is_open:
        thinking = copy(thinking)
        thinking.read(draw.draft)
    return thinking.forced()


def _behind(matcher: Any, draft: abc.Sequence[int]) -> Any:
    """The matcher after the draft; None if no token can follow, because the grammar ends in the draft or does not allow it. A copy:
    llguidance cannot roll a matcher back behind its end."""
    if matcher is None or not draft:
        return matcher
    matcher = matcher.deep_copy()
    return matcher if matcher.consume_tokens(list(draft)) and not matcher.is_stopped() else None


def _ban(logits: Tensor, rows: list[int], draws: list[Draw]) -> None:
    """Forbid, in place, each token that would complete a banned sequence of tokens."""
    if places := [(i, token) for i in rows for token in _completing(draws[i])]:
        index = to_device(places, torch.int64, logits.device)
        logits.index_put_((index[:, 0], index[:, 1]), logits.new_full((), -torch.inf))


def _completing(draw: Draw) -> list[int]:
    """The tokens that would complete a banned sequence of generated tokens."""
    sequence, state = draw.sequence, draw.sequence.state
    if not state.banned:
        return []
    first = max(sequence.prompt_length, len(sequence.tokens) - state.longest_banned)
    if not (before := [*sequence.tokens[first:], *draw.draft]):  # also behind a token that a late grammar took back
        return []
    return [ids[-1] for ids in state.banned.get(before[-1], ()) if before[1 - len(ids) :] == ids[:-1]]


def _penalize(logits: Tensor, rows: list[int], draws: list[Draw]) -> None:
    """Apply the penalties to `rows`, in place. Presence and frequency penalties count generated tokens (OpenAI). The
    repetition penalty (CTRL, arXiv:1909.05858) also counts the prompt's: it divides a seen token's positive logit and
    multiplies a negative one."""
    if not rows:
        return
    sequences = [draws[i].sequence for i in rows]
    for sequence in sequences:
        _count(sequence, logits)
    states, params = [s.state for s in sequences], [s.params for s in sequences]
    counts = torch.stack([s.counts for s in states])
    if drafted := [(row, token) for row, i in enumerate(rows) for token in draws[i].draft]:
        places = to_device(drafted, torch.int64, logits.device)
        counts.index_put_((places[:, 0], places[:, 1]), counts.new_ones(()), accumulate=True)
    none = torch.zeros_like(counts[0], dtype=torch.bool)
    seen = (counts > 0) | torch.stack([none if s.prompt is None else s.prompt for s in states])

    def column(name: str) -> Tensor:
        return to_device([[getattr(p, name)] for p in params], torch.float32, logits.device)

    index = to_device(rows, torch.int64, logits.device)
    chosen, repetition = logits[index], column("repetition_penalty")
    chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
    logits[index] = chosen - column("frequency_penalty") * counts - column("presence_penalty") * (counts > 0)


def _count(sequence: Sequence, logits: Tensor) -> None:
    """Create the counts. Generated tokens that they do not hold yet are known."""
    state = sequence.state
    if state.counts is None:
        state.counts = torch.zeros(logits.shape[-1], device=logits.device)
        if sequence.params.repetition_penalty != 1:
            state.prompt = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            ids = sorted(set(sequence.tokens[: sequence.prompt_length]))
            state.prompt.index_fill_(0, to_device(ids, torch.int64, logits.device), True)
    for token in sequence.tokens[sequence.prompt_length + state.counted :]:
        state.counts[token] += 1
    state.counted = max(state.counted, sequence.generated)


def count_drawn(chunks: list[Chunk], tokens: Tensor) -> None:
    """Count tokens (B,) int64 that were drawn for penalized sequences, before the host knows them. Of a token behind a draft nobody knows
    yet whether it is new: `_count` counts it later."""
    i = -1
    for chunk in chunks:
        sequence = chunk.sequence
        i += 1 + len(chunk.draft)
        if is_penalized(sequence.params) and sequence.finish_reason is None and not chunk.draft:
            sequence.state.counts.index_add_(0, tokens[i : i + 1].clamp(min=0), torch.ones_like(sequence.state.counts[:1]))
            sequence.state.counted += 1


def advance(sequence: Sequence, token: int) -> bool:
    """Advance the sequence's grammar by a token that was drawn, and is not recorded yet. False: a late grammar forbids it, and it
    must be drawn again."""
    state, params = sequence.state, sequence.params
    if not params.late_grammar:
        if state.matcher is not None:
            state.matcher.consume_token(token)
        return True
    matcher = _matcher(sequence)
    if matcher is None:  # it was optional and has failed
        return True
    if token in params.stop_token_ids and _may_stop(sequence, matcher):
        return True
    again = state.again == len(sequence.tokens)
    if again or not _runs_on(sequence, matcher, token):
        taken = matcher.try_consume_tokens([token]) or matcher.is_error()
        if taken or again:
            return True
    state.again = len(sequence.tokens)
    return False


def _runs_on(sequence: Sequence, matcher: Any, token: int) -> bool:
    """Whether the token is a digit too many of a number."""
    digits = sequence.state.digits
    if digits is None or not digits.beginning >> token & 1:
        return False
    return not int.from_bytes(_packed(sequence, matcher), "little") >> token & 1


def is_plain(sequence: Sequence) -> bool:
    """Whether the next token depends only on the logits, the temperature and the seed, so that a graph can draw it."""
    params = sequence.params
    return not (params.is_filtered or params.min_tokens or params.logprobs is not None or needs_processing(sequence))


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of B sequences as tensors of shape (B, 1). The flags tell which computations can be skipped."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor  # -inf: no filter
    seed: Tensor
    all_greedy: bool
    any_filter: bool

    @classmethod
    def of(cls, params: abc.Sequence[SamplingParams], device: torch.device) -> "SamplingBatch":
        def column(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return to_device([[value] for value in values], dtype, device)

        return cls(
            temperature=column(p.temperature for p in params),
            top_k=column((p.top_k for p in params), torch.int64),
            top_p=column(p.top_p for p in params),
            log_min_p=column(math.log(p.min_p) if p.min_p else -math.inf for p in params),
            seed=column((p.seed for p in params), torch.int64),
            all_greedy=all(p.temperature == 0 for p in params),
            any_filter=any(p.is_filtered for p in params),
        )


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> Tensor:
    """Draw one token for each of B sequences: (B, V) fp32 logits and the tokens' positions (B, 1) int64, to (B,) int64. NO_TOKEN where
    the best score is not finite: a logit is NaN or infinite, or all are minus infinity."""
    best, tokens = logits.max(-1)
    if not batch.all_greedy:
        scaled = logits / batch.temperature.clamp(min=1e-6)
        if batch.any_filter:
            scaled = scaled.masked_fill(~keep(scaled, batch), -torch.inf)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        best_drawn, drawn = (scaled + gumbel_noise(batch.seed, positions, ids)).max(-1)
        greedy = batch.temperature[:, 0] == 0
        best, tokens = torch.where(greedy, best, best_drawn), torch.where(greedy, tokens, drawn)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def keep(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """(B, V) bool: the tokens that pass top-k, then top-p over the rest, then min-p. The likeliest always passes."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocab = scaled.shape[-1]
    rank = torch.arange(vocab, device=scaled.device)
    passes = rank < torch.where(batch.top_k == 0, vocab, batch.top_k)
    probabilities = softmax(ordered.masked_fill(~passes, -torch.inf))
    whole = _whole(probabilities)
    before = whole.cumsum(-1) - whole  # the probability of all likelier tokens
    passes &= (before < _whole(batch.top_p)) | (batch.top_p == 1)  # rounding may make `before` 1 while tokens are left
    passes &= ordered - ordered[:, :1] >= batch.log_min_p  # logarithms, because probabilities and their products underflow
    passes[:, 0] = True
    return torch.zeros_like(passes).scatter_(-1, order, passes)


def _whole(probabilities: Tensor) -> Tensor:
    """fp32 as int64 multiples of 2^-60, whose sums are the same in every order."""
    return (probabilities.double() * 2.0**60).long()

"""Changes of logits before a token is drawn, by a request's parameters: penalties, biases, allowed ids, banned sequences,
minimum length, the end of reasoning, grammars. Rows of requests without any of these stay unchanged."""

from collections import abc
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.grammars import Digits
from engine.protocol import SamplingParams, TokenLogprobs
from engine.sequence import Chunk, Draw, Sequence
from engine.thinking import Thinking
from engine.transfers import to_device
from errors import UserError
from text.tokenizer import Tokenizer


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
    pooled: Tensor | None = None  # (C,) int64, see pooling.py: the sum of the hidden states so far


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

"""The engine of one rank: takes requests, computes step by step, returns outputs. It has no sockets or processes.

Every rank runs the same engine on the same events in the same order; only rank 0's outputs are used.
"""

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor

from checkpoints.eagle import EagleHead
from config import require_causal
from engine.adapters import Adapter, Adapters
from engine.grammars import COMPILED, MAX_COMPILING, Compilation, Grammars, error_of
from engine.head_model import HeadModel
from engine.limits import STEP_TOKENS, EngineLimits, count_blocks, new_cache
from engine.model_drafter import HeadDrafter, ModelDrafter
from engine.pace import Pace
from engine.protocol import Abort, LoadAdapter, Refused, Stats, Submit, SubmitAll, TokenLogprobs, TokenOutput, UnloadAdapter
from engine.runner import InFlightStep, Runner, StepResult
from engine.sampler import advance, check_ids, new_state, sibling
from engine.scheduler import Scheduler
from engine.schedules import Schedules
from engine.sequence import BlockManager, Chunk, Sequence, common_prefix
from engine.speculation import Speculation, measure
from engine.step_inputs import Capacity
from engine.text_drafter import PromptIndex
from errors import RankError, UserError
from kernels import determinism
from model import Transformer
from text.tokenizer import Tokenizer
from tp import World

OVERFLOW = (
    "there is no answer, because the model's numbers overflowed, it has no lm_head, or the request's parameters exclude all tokens; "
    "against overflow, give --dtype bfloat16 or float32"
)


class Meter:
    """Counts tokens, steps and their seconds, in total and since the last `stats`."""

    def __init__(self, waited: float) -> None:
        """waited: the seconds for which this rank has waited for all-reduces so far."""
        self.prompt_tokens = self.generation_tokens = self.steps = 0
        self.token_seconds: float | None = None  # see `Stats`
        self._seconds, self._waited = 0.0, waited
        self._batch_tokens: list[int] = []

    def count(self, batch_tokens: int, generated: int, seconds: float) -> None:
        """Count a step that computed `batch_tokens` tokens and generated some."""
        self.steps += 1
        self.generation_tokens += generated
        self._seconds += seconds
        self._batch_tokens.append(batch_tokens)
        self.token_seconds = min(seconds / max(1, batch_tokens), self.token_seconds or seconds)

    def stats(self, runner: Runner) -> Stats:
        """The counts. runner: of the steps."""
        seconds, batch_tokens = self._seconds, self._batch_tokens
        self._seconds, self._batch_tokens = 0.0, []
        waited, idle = runner.model.comm.waited, None if runner.graphs is None else runner.idle_seconds
        since = None if waited is None else waited - self._waited
        self._waited, runner.idle_seconds = waited or 0.0, 0.0

        def share(part: float | None) -> float | None:
            return min(1.0, part / seconds) if part is not None and seconds else None

        return Stats(
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            step_seconds=seconds / max(1, len(batch_tokens)),
            batch_tokens=batch_tokens,
            all_reduce_share=share(since),
            idle_share=share(idle),
            token_seconds=self.token_seconds,
        )


def new_drafter(
    model: Transformer | HeadModel, limits: EngineLimits, text_ids: int, capacity: Capacity, blocks: BlockManager, world: World
) -> ModelDrafter:
    """The drafter of a draft model or head, with a cache of its own beside the target's `blocks`. Collective."""
    cache = new_cache(model, blocks.n_blocks, limits, world.device)
    own = world if model.comm.world_size > 1 else World(0, 1, world.device, model.comm)
    schedules, longest = Schedules.of(model, own, limits.kv_dtype), model.config.max_seq_len
    if isinstance(model, HeadModel):
        return HeadDrafter(Runner(model, cache, text_ids, capacity, schedules, shift=1), blocks, longest, model)
    return ModelDrafter(Runner(model, cache, text_ids, capacity, schedules), blocks, longest)


class Engine:
    """Requests go in by `submit` and `abort`; each `step` returns new tokens. `admit` queues requests that waited for a
    grammar."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
        world: World,
        draft: Transformer | EagleHead | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """draft: a smaller model that drafts or a draft head (`model_drafter.py`). adapters: of the model."""
        config = model.config
        self.max_model_len = limits.context(config)
        self.vocab_size, self.world, self.adapters = config.vocab_size, world, adapters
        schedules = Schedules.of(model, world, limits.kv_dtype)
        batch_tokens = limits.max_batch_tokens or STEP_TOKENS
        if not config.causal:  # a step computes whole prompts, and needs no room for an answer
            self.max_model_len = min(self.max_model_len, batch_tokens)
        # of a drafter: at least 2, because `Costs` needs two measured points
        sequences, tokens = max(2, limits.max_num_seqs), max(2, batch_tokens)
        drafting = HeadModel(draft, model, sequences + tokens) if isinstance(draft, EagleHead) else draft
        blocks = BlockManager(count_blocks(model, drafting, limits, world), limits.block_size)
        whole, drafted = limits.whole_sequences or not config.causal, limits.drafted
        self.scheduler = Scheduler(
            blocks, limits.max_num_seqs, batch_tokens, self.max_model_len, whole, drafted, whole_prompts=not config.causal
        )

        text_ids = min(tokenizer.vocab_size if tokenizer else config.vocab_size, config.vocab_size)
        longest = blocks.blocks_for(self.max_model_len)
        capacity = Capacity(limits.max_num_seqs, batch_tokens, longest, drafted)
        layers = draft.config.stream_layers if isinstance(draft, EagleHead) else ()
        cache, slots = new_cache(model, blocks.n_blocks, limits, world.device), adapters.limits.slots if adapters else 0
        self.runner = Runner(model, cache, text_ids, capacity, schedules, layers, adapters=slots)
        self.look_ahead = self.runner.graphs is not None  # whether steps are launched before the tokens of the last are known
        self._ahead: InFlightStep | None = None  # the step that was launched so
        self.pace = Pace()

        drafter = None
        if drafting is not None:
            drafter = new_drafter(drafting, limits, text_ids, Capacity(sequences, tokens, longest), blocks, world)
        # without `self`: an engine in a cycle would keep its memory until the garbage collector finds it
        measured = partial(measure, self.runner, drafter, self.max_model_len, world)
        prompts = PromptIndex(limits.ngram_prompts) if limits.ngram_prompts else None
        self.speculation = Speculation(limits.draft_tokens, measured, drafter, limits.accept_rate, prompts)

        self.grammars = Grammars(tokenizer, config.vocab_size)
        # by a grammar's text: its compilation, and the requests that wait for it
        self.compiling: dict[str, tuple[Compilation, list[Sequence]]] = {}
        self.refused: list[Refused] = []  # added by `admit` and `step`; the worker sends them
        self.meter = Meter(model.comm.waited or 0.0)

    def capture(self, quiet: bool = True) -> None:
        """Capture all graphs and measure what drafts need to know, before requests arrive. Collective. Raises RankError if this rank's
        memory runs out: the other ranks then wait for it, and must be ended."""
        try:
            self.runner.capture(quiet)
            if self.speculation.model_drafter is not None:
                self.speculation.model_drafter.runner.capture(quiet)
            self.speculation.prepare()
        except torch.OutOfMemoryError as e:
            short = f"rank {self.world.rank}'s memory ran out beside the weights and the KV cache; give less to --kv-memory"
            raise RankError(f"{short}, or lower --max-num-seqs or --max-batch-tokens: {str(e).splitlines()[0][:200]}") from None

    # --- requests ----------------------------------------------------------------------------------------------------------

    def submit(self, message: Submit | SubmitAll) -> Refused | None:
        """Accept a request, or many that share their parameters: all or none. Returns None, or a `Refused` for the
        first one with the reason."""
        if self.adapters and (loading := self.adapters.loading.get(message.adapter)):
            loading.waiting.append(message)
            return None
        submits = [message] if isinstance(message, Submit) else message.submits()
        try:
            sequences = self._sequences(submits)
        except UserError as e:
            return Refused(submits[0].request_id, str(e))
        grammar, optional = submits[0].params.grammar, submits[0].params.grammar_optional
        try:
            if grammar is not None:
                self.grammars.check(grammar)
        except UserError as e:
            if not optional:
                return Refused(submits[0].request_id, str(e), "invalid_schema")
            grammar = None
        # the same on all ranks, whatever they have compiled so far
        if grammar is not None and grammar not in self.compiling:
            if self._may_compile(submits[0].turn.client):
                self.compiling[grammar] = self.grammars.start(grammar), []
            elif optional and not determinism.enabled() and not any(submit.generated for submit in submits):
                grammar = None  # but not behind tokens that it may have constrained, nor if load must not change an answer
            else:
                why = "too many other grammars of this client, or of all, are waiting to be compiled; try again later"
                return Refused(submits[0].request_id, why, "grammars_busy")
        if grammar is None:
            for sequence in sequences:
                self.scheduler.add(sequence)
        else:
            self.compiling[grammar][1].extend(sequences)
        self.meter.prompt_tokens += sum(sequence.prompt_length for sequence in sequences)
        return None

    def _may_compile(self, client: str) -> bool:
        """Whether another grammar of the client may wait to be compiled: if it has fewer there than places are free, so that further
        clients find some (A. K. Choudhury, E. L. Hahne, "Dynamic queue length thresholds", 1998, with alpha 1)."""
        own = sum(waiting[0].client == client for _, waiting in self.compiling.values())
        return own < MAX_COMPILING - len(self.compiling)

    def _sequences(self, submits: list[Submit]) -> list[Sequence]:
        """A sequence for each request. What the requests share is checked and created once. Raises UserError."""
        adapter = self._adapter(submits[0].adapter)
        if submits[0].params.pooling is None:
            require_causal(self.runner.model.config)
        state = new_state(submits[0].params, self.vocab_size, self.world.device, self.grammars.tokenizer)
        checked: list[int] | None = None
        sequences = []
        for submit in submits:
            prompt = submit.prompt_ids
            repeats = prompt is checked
            if not repeats:
                if not prompt:
                    raise UserError("the prompt is empty; give at least one token")
                check_ids(prompt, self.vocab_size)
                checked = prompt
            check_ids(submit.generated, self.vocab_size)
            params = submit.params
            if submit.generated and params.prompt_logprobs is not None:  # they were sent with the first token
                params = params.changed(prompt_logprobs=None)
            tokens = [*prompt, *submit.generated]
            sequence = Sequence(submit.request_id, tokens, len(prompt), params, submit.turn, time.perf_counter())
            sequence.state, sequence.adapter, sequence.repeats = sibling(state), adapter, repeats
            self.scheduler.check(sequence)
            sequences.append(sequence)
        return sequences

    def _adapter(self, name: str) -> Adapter | None:
        """Raises UserError."""
        if not name:
            return None
        if self.adapters is None:
            raise UserError(f"this engine has no adapters, so not {name!r}")
        return self.adapters.find(name)

    def change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load an adapter, or unload one; `adapters.done` then has the answer."""
        adapters = self.adapters
        assert adapters is not None, "the frontend sends this only to engines with adapters"
        if isinstance(message, LoadAdapter):
            adapters.load(message)
            return
        users = [s for s in [*self._uncompiled, *self.scheduler.by_id.values()] if s.adapter and s.adapter.name == message.name]
        adapters.unload(message, len(users))

    def abort(self, message: Abort) -> None:
        """Remove a request, wherever it waits or runs."""
        for loading in self.adapters.loading.values() if self.adapters else ():
            if loading.waiting:
                loading.waiting.append(message)  # its request may be one of them
        for text, (compilation, waiting) in self.compiling.items():
            left = [s for s in waiting if s.request_id != message.request_id]
            if len(left) == len(waiting):
                continue
            if left:
                self.compiling[text] = compilation, left
            else:
                del self.compiling[text]
                self.grammars.drop(compilation)
            return
        sequence = self.scheduler.by_id.get(message.request_id)
        if sequence is not None and message.used is not None:
            self.speculation.discard(sequence, sequence.generated - message.used)
        self.scheduler.abort(message.request_id)
        self._rest()

    def abort_all(self) -> None:
        for loading in self.adapters.loading.values() if self.adapters else ():
            loading.waiting.clear()
        for request_id in [*(s.request_id for s in self._uncompiled), *self.scheduler.by_id]:
            self.abort(Abort(request_id))

    def admit(self) -> None:
        """Queue the requests whose grammar all ranks have compiled and whose adapter they have loaded, and refuse those of which that
        failed on any rank. One whose grammar is optional goes on without it.

        Collective: ranks compile and read at different speeds, so they have to agree.
        """
        for loading in self.adapters.admit() if self.adapters else ():
            for message in loading.waiting:
                if isinstance(message, Abort):
                    self.abort(message)
                elif refused := self.submit(message):
                    self.refused.append(refused)
        if not self.compiling:
            return
        states = self.world.smallest([compilation.state for compilation, _ in self.compiling.values()])
        for text, state in zip(list(self.compiling), states, strict=True):
            if not state:
                continue
            compilation, waiting = self.compiling.pop(text)
            for sequence in waiting:
                if state == COMPILED or sequence.params.grammar_optional:
                    sequence.state.grammar = compilation.matcher if state == COMPILED else None
                    sequence.state.digits = self.grammars.digits(text)
                    self.scheduler.add(sequence)
                else:
                    why = compilation.error or "another rank could not compile the grammar"
                    self.refused.append(Refused(sequence.request_id, why, "invalid_schema"))
            if state == COMPILED:
                self.grammars.keep(compilation)

    @property
    def _uncompiled(self) -> list[Sequence]:
        """The requests that wait for a grammar."""
        return [s for _, waiting in self.compiling.values() for s in waiting]

    @property
    def preparing(self) -> bool:
        """Whether `admit` waits for a thread, for requests that wait or for an adapter."""
        return bool(self.compiling or (self.adapters and self.adapters.loading))

    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return self.scheduler.has_work()

    # --- steps -------------------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Compute one step and return each sequence's new output. The next step is launched before this step's tokens are
        waited for, so that the device does not wait for the host."""
        start = time.perf_counter()
        step, self._ahead = self._ahead or self._launch(self._schedule(), start), None
        if self._may_follow(step) and (chunks := self.scheduler.schedule(in_flight=True)):
            self._ahead = self._launch(chunks, start, after=step)
        outputs = list(self._record(step))
        self.pace.follow(step, self._ahead)
        self.speculation.observe(step, is_last=self._ahead is None)
        self._rest()
        if self._ahead is not None:
            self.runner.draw(self._ahead)
        one_each = not step.has_drafts and step.pooled is None
        generated = len(outputs) if one_each else sum([len(output.token_ids) for output in outputs])
        seconds = time.perf_counter() - start + self.pace.paused
        self.meter.count(sum(c.count for c in step.chunks), generated, seconds)
        return outputs

    def _rest(self) -> None:
        """If no sequence runs or waits, drop the step that was launched ahead: nobody needs its tokens."""
        if not self.has_work():
            self._ahead = None
            self.runner.rest()
            self.pace.rest()

    def _schedule(self) -> list[Chunk]:
        """The next step, whose sequences' tokens are all known."""
        room = self.scheduler.draft_room(self.speculation.plan(self.scheduler.running))
        drafts = self.speculation.drafts(room)
        if (drafter := self.speculation.model_drafter) is not None:
            self.runner.wait_from(drafter.ready)
        return self.scheduler.schedule(drafts={sequence: drafts.get(sequence, []) for sequence in room})

    def _may_follow(self, step: InFlightStep) -> bool:
        """Whether the step after `step` may be launched now. Which rows of a draft are kept, and how the next draft begins, depends
        on the tokens of `step`; and a capture would hold them up."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if not self.look_ahead or step.has_drafts:
            return False
        if not self.runner.is_captured(len(running)) and not waiting and all(s.wanted <= 1 for s in running):
            return False  # it decodes all sequences
        return not self.speculation.expects(running)

    def _launch(self, chunks: list[Chunk], now: float, after: InFlightStep | None = None) -> InFlightStep:
        for chunk in chunks:
            if chunk.sequence.first_scheduled is None:
                chunk.sequence.first_scheduled = now
        step = self.runner.launch(chunks, after)
        self.scheduler.launched(chunks)  # not earlier: the launch may fail
        return step

    def _record(self, step: InFlightStep) -> Iterator[TokenOutput]:
        """Append the tokens to the sequences that are still running. Yields the output of each."""
        result = self.runner.collect(step)
        yield from self._embeddings(step)
        if step.has_drafts:
            yield from self._verify(step, result)
            return
        for chunk, token, entry in zip(step.sampling, result.tokens, result.logprobs, strict=True):
            sequence = chunk.sequence
            # else it has ended since the step was launched, or the token before is drawn again
            expected = sequence.finish_reason is None and chunk.stop == len(sequence.tokens)
            expected = expected and not self._overflowed(sequence, [token])
            if expected and self._append(sequence, token) and sequence.finish_reason != "error":
                yield self._output(sequence, [token], [entry])

    def _embeddings(self, step: InFlightStep) -> Iterator[TokenOutput]:
        """End the running sequences whose prompts were pooled. Yields the output of each."""
        for sequence, vector in zip(*(step.pooled or ((), ())), strict=True):
            if sequence.finish_reason is None and not self._overflowed(sequence, [], vector):
                self.scheduler.finish(sequence, "stop")
                output = self._output(sequence, [], [None])
                yield msgspec.structs.replace(output, embedding=vector.numpy().astype("<f4").tobytes())

    def _verify(self, step: InFlightStep, result: StepResult) -> Iterator[TokenOutput]:
        """Append the tokens of a step with drafts: of those that a chunk draws, the ones up to the first that its draft had wrong.
        Yields the output of each sequence."""
        first = 0
        for chunk in step.sampling:
            sequence, draft, stop = chunk.sequence, chunk.draft, first + 1 + len(chunk.draft)
            drawn, entries, first = result.tokens[first:stop], result.logprobs[first:stop], stop
            if sequence.finish_reason is not None or self._overflowed(sequence, drawn):
                continue
            drawn = self.speculation.simulated(chunk, drawn, self.runner.text_ids)
            accepted = common_prefix(draft, drawn)
            if accepted < len(draft):
                self.scheduler.reject(sequence, len(draft) - accepted)
            taken = 0
            while taken <= accepted and sequence.finish_reason is None and self._append(sequence, drawn[taken]):
                taken += 1
            accepted = min(accepted, taken)  # fewer if it has ended, or a token is drawn again
            if draft:
                # a step draws a token without a draft, too: if a drafted one ends the answer, there is no other
                saved = accepted if sequence.finish_reason is None else taken - 1
                self.speculation.learn(chunk, accepted, saved)
            if taken and sequence.finish_reason != "error":
                output = self._output(sequence, drawn[:taken], entries[:taken])
                yield msgspec.structs.replace(output, drafted=len(draft), accepted=accepted)

    def _append(self, sequence: Sequence, token: int) -> bool:
        """Append a token, and end the sequence if its grammar lets nothing follow, or fails and is not optional. False: the token is
        forbidden; a later step draws it again."""
        if not advance(sequence, token):
            self.scheduler.draw_again(sequence)
            self.runner.decode.forget()
            return False
        self.scheduler.record(sequence, token)
        matcher = sequence.state.matcher
        if matcher is None or not matcher.is_stopped():
            return True
        if problem := error_of(matcher):
            self.grammars.forget(sequence.state.grammar)
            if sequence.params.grammar_optional:
                sequence.state.grammar = sequence.state.matcher = None
            else:
                self._fail(sequence, problem, "invalid_schema")
        elif sequence.finish_reason is None:
            self.scheduler.finish(sequence, "stop")
        return True

    def _overflowed(self, sequence: Sequence, drawn: list[int], vector: Tensor | None = None) -> bool:
        """Whether some number of a running sequence's results is not finite. Then it is computed again, and fails if it overflows again.

        The first time, it may have read the keys and values of another one that overflowed: with the same prefix, or of a wrong draft.
        Attention multiplies them by 0, and 0 times NaN is NaN. So nobody gets these blocks as they are."""
        if min(drawn, default=0) >= 0 and not sequence.state.overflowed and (vector is None or bool(vector.isfinite().all())):
            return False
        blocks = self.scheduler.blocks
        blocks.forget(sequence.blocks)
        self.runner.clear([block for block in sequence.blocks if blocks.owners[block] == 1])
        if sequence.alone:
            self._fail(sequence, OVERFLOW, "overflow")
            return True
        again = dataclasses.replace(sequence, blocks=[], computed=0, unknown=0, published=0, alone=True)
        again.state, again.drafter, again.repeats = sibling(sequence.state), None, False
        again.state.grammar, again.state.digits = sequence.state.grammar, sequence.state.digits
        self.scheduler.finish(sequence, "error")
        self.scheduler.add(again)
        return True

    def _fail(self, sequence: Sequence, problem: str, code: Literal["invalid_schema", "overflow"]) -> None:
        if sequence.finish_reason is None:
            self.scheduler.finish(sequence, "error")
        sequence.finish_reason = "error"  # not "length": it has no output
        self.refused.append(Refused(sequence.request_id, problem, code))

    def _output(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> TokenOutput:
        """The output of a sequence's newest tokens. logprobs: of each, all None if it does not ask for them."""
        output = TokenOutput(
            sequence.request_id,
            tokens,
            finish_reason=sequence.finish_reason,
            logprobs=None if logprobs[0] is None else logprobs,  # type: ignore[arg-type]
        )
        if sequence.generated > len(tokens):
            return output
        now, scheduled = time.perf_counter(), sequence.first_scheduled or sequence.arrival
        wants_prompt = sequence.params.prompt_logprobs is not None
        return msgspec.structs.replace(
            output,
            prompt_logprobs=sequence.state.prompt_logprobs if wants_prompt else None,
            cached_tokens=sequence.cached_tokens,
            queue_seconds=scheduled - sequence.arrival,
            prefill_seconds=now - scheduled,
        )

    # --- statistics --------------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """The engine's state now, and what its steps took since the last call."""
        scheduler = self.scheduler
        return msgspec.structs.replace(
            self.meter.stats(self.runner),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._uncompiled),
            kv_blocks_used=scheduler.blocks.used,
            kv_blocks_total=scheduler.blocks.n_blocks,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            drafted=dict(self.speculation.total),
        )

"""Rung from Python: load a model, generate, score.

    from engine import LLM, SamplingParams

    llm = LLM("models/tiny-hybrid")
    for answer in llm.generate(["Once upon a time", "One day"], SamplingParams(max_tokens=60, temperature=0.7)):
        print(answer.text)

`LLM(…, tp=2)` starts the other tensor-parallel rank itself. Or each rank runs the same program and makes the same calls:
`python launch.py --ranks 2 program.py`.
"""

import asyncio
import json
import operator
import os
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor
from tqdm import tqdm

from checkpoints.hub import fetched
from checkpoints.presets import has_random_weights, model_config
from checkpoints.weights import DTYPES, chosen_dtype, load_model
from cli import note
from config import ModelConfig, require_causal
from engine.adapters import ADAPTER, single_adapter
from engine.calls.choice import call_reader
from engine.calls.syntax import Marks
from engine.constrain.demand import calls_grammar
from engine.constrain.formats import format_grammar
from engine.core import OVERFLOW, Engine
from engine.draft_models import Draft, find_draft
from engine.followers import Followers
from engine.limits import EngineLimits
from engine.pooling_file import Embedder, checkpoint_embedder
from engine.protocol import Abort, SamplingParams, Submit, TokenLogprobs, check_types
from engine.runner import LARGEST_MEASURED, largest_graph
from engine.sampler import SCORE_CHUNK, check_ids
from engine.text import AnswerStream, Delta, banned_by
from engine.thinking import budget_after, reasoning_after, reasoning_of
from engine.tuning import tune
from errors import OverflowedError, UserError
from files import model_folder, shown
from kernels import determinism
from kernels.sampling import log_softmax
from layers.attention import Causal
from model import Transformer
from options import MOST_DRAFT_TOKENS, draft_limit
from ranks.bounded import bounded
from text.chat_form import Message
from text.tokenizer import Tokenizer, check_fits
from text.tokenizer_files import find_tokenizer, load_tokenizer
from tp import World, init_world

PREFILL_TOKENS = 1 << 16  # most tokens of a step: enough to use a GPU fully, and the activations fit
MAX_SEQUENCES = 256  # most sequences of a step
WITHOUT_CACHE = "computes in one step, without the KV cache whose data type this is"
FORMATS = ("json_schema", "regex", "choice")  # fields of SamplingParams that say what an answer is
BAR_SECONDS = 2.0  # a call that is shorter shows no bar
COMPILING_SECONDS = 0.002  # between checks of grammars that are being compiled, while there is no other work


@dataclass
class Timing:
    """Seconds of one call of `LLM.stream`, each measured until the tokens are on the host."""

    prefill: float = 0.0  # of all steps until each sequence has its first token, in which the first ones decode already
    steps: list[float] = field(default_factory=list)  # of each step after that
    tokens: int = 0  # generated in these steps


@dataclass
class Completion:
    """One answer."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # empty for a model without a tokenizer
    finish_reason: str | None = None  # `stop`, `length`, with tools also `tool_calls`; None while it goes on
    stop_reason: str | int | None = None  # the stop string or token that ended it
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each of token_ids, if requested
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None: not requested; the first entry is None
    message: dict[str, Any] | None = None  # of `chat` with tools: as /v1/chat/completions has it, with `tool_calls`


@dataclass
class Scores:
    """logprobs: the natural log-probability of each token given those before it, None for the first. argmax: for each token the
    likeliest next one."""

    logprobs: list[float | None]
    argmax: list[int]


class LLM:
    """A model that generates and scores. Under a launcher all calls are collective: every rank makes the same ones."""

    def __init__(
        self,
        model: str | Path | Transformer,
        tokenizer: Tokenizer | None = None,
        world: World | None = None,
        *,
        tp: int | None = None,
        variant: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        kv_dtype: str | None = None,
        seed: int = 0,
        limits: EngineLimits | None = None,
        speculate: str | Path | None = None,
        draft_tokens: int | None = None,
        deterministic: bool = False,
        lora: str | Path | None = None,
    ) -> None:
        """model: a checkpoint's folder or name on the hub (ORG/NAME), a preset's name (random weights, drawn with `seed`), or a loaded
        model, whose `tokenizer` then has to be given. tp: start as many ranks, of which this process is the first; they end with it, or at
        `close`. world: the ranks (default: those that a launcher started, else one on the GPU, if there is any).
        variant, dtype, quantize: as `generate.py` takes them; not of a loaded model. limits: of the engine; None makes an engine for
        each call that is just large enough for its prompts, and keeps it while calls need the same. kv_dtype, draft_tokens: as
        `generate.py` takes them; with limits they are fields of these. speculate: as `generate.py` takes it; with limits it needs their
        draft_tokens. deterministic: for this and all further models of the process; with a `world` or a loaded model, `tp.init_world`
        takes it. lora: an adapter's folder, for all calls. Raises UserError, also for an argument of another type and for what would
        have no effect."""
        given = {name: value for name, value in locals().items() if name != "self"}
        check_types(LLM.__init__, given)
        loaded = isinstance(model, Transformer)
        if loaded:
            _refuse_given("give it where the model is loaded", tp=tp, variant=variant, dtype=dtype, quantize=quantize)
        _check_limits(limits, str(speculate) if speculate else None, kv_dtype, draft_tokens)
        if deterministic and not determinism.enabled() and (world is not None or loaded):
            raise UserError("give deterministic=True to init_world, before the ranks are connected and a model is loaded")
        draft_tokens = 7 if draft_tokens is None else draft_tokens
        if not 1 <= draft_tokens <= MOST_DRAFT_TOKENS:
            raise UserError(f"draft_tokens must be from 1 to {MOST_DRAFT_TOKENS}, not {draft_tokens}")
        for name, files in {"model": "model", "speculate": "draft", "lora": "adapter"}.items():
            given[name] = fetched(str(given[name]), files) if isinstance(given[name], str | Path) else given[name]
        self._followers, self._name = _followers(given), None if loaded else given["model"]
        try:
            self.world = world or init_world(deterministic=deterministic)
            determinism.refuse(determinism.enabled(), adapters=lora)
            draft = self._load(given)
            self.adapters = single_adapter(self.model, given["lora"], self.world) if lora else None
            self.draft = draft.load(self.world, self.model.norm.weight.dtype, seed) if draft else None
            # uses what a server or `make tune` has measured
            tune(self.model, self.world, MAX_SEQUENCES, seconds=0, draft=self.draft)
        except BaseException:
            self.close()
            raise
        self.limits, self.kv_dtype = limits, kv_dtype or "auto"
        self.draft_tokens = draft_limit(given["speculate"], draft_tokens)
        self._engine: tuple[EngineLimits, Engine] | None = None
        self._streaming = False  # whether a call of `stream` has begun and not ended

    def _load(self, given: Mapping[str, Any]) -> Draft | None:
        """Set `model` and `tokenizer`. Returns what `speculate` names. given: the arguments of `__init__`."""
        model, speculate, size = given["model"], given["speculate"], self.world.world_size
        if isinstance(model, Transformer):
            self.model, self.tokenizer = model, given["tokenizer"]
            return find_draft(speculate, None, model.config, self.tokenizer, size)
        config = model_config(model, given["variant"], size, given["quantize"])
        self.tokenizer = given["tokenizer"] or read_tokenizer(model, config)
        name = chosen_dtype(given["dtype"], model, config, self.world)
        if name not in DTYPES:
            raise UserError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
        draft = find_draft(speculate, model, config, self.tokenizer, size)
        self.model = load_model(model, config, self.world, DTYPES[name], given["seed"])
        return draft

    def close(self) -> None:
        """End the ranks that `tp` has started. No call may follow."""
        if self._followers:
            self._followers.close()

    def _tell(self, call: str, *arguments: Any) -> None:
        if self._followers:
            self._followers.tell(call, arguments)

    @contextmanager
    def _everywhere(self, call: str, *arguments: Any) -> Iterator[None]:
        """A call that the ranks of `tp` make, too. If it is interrupted here, they end: they would wait amid it."""
        self._tell(call, *arguments)
        try:
            yield
        except (UserError, OverflowedError, GeneratorExit):  # on all ranks
            raise
        except BaseException:
            self.close()
            raise

    def _check_idle(self) -> None:
        if self._streaming:
            raise UserError("an earlier call of stream has not ended; iterate over it to its end or close it, then call again")

    @cached_property
    def embedder(self) -> Embedder:
        """How the checkpoint makes vectors. Raises UserError for steps that are not computed here."""
        return Embedder() if self._name is None or has_random_weights(self._name) else checkpoint_embedder(self._name)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(self.model.config.eos_token_ids) | frozenset(self.tokenizer.eos_ids if self.tokenizer else ())

    @property
    def engine(self) -> Engine | None:
        """The engine of the latest call; None before the first."""
        return self._engine and self._engine[1]

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """The answers to prompts of any lengths, texts or token ids. A text alone is one prompt. params: one for each prompt, or
        one for all, of which prompt i draws with seed + i. None: the defaults, whose seed is 0, so that each call gives the same.
        progress: show a bar on stderr while several prompts take seconds.

        Raises UserError for a prompt that does not fit, and OverflowedError, a RuntimeError, if the model's numbers overflow."""
        ids = self._encode_all(prompts)
        answers = [Completion(prompt) for prompt in ids]
        quiet = not progress or len(ids) < 2 or self.world.rank > 0
        with tqdm(total=len(ids), unit="answer", disable=quiet, delay=BAR_SECONDS, leave=False) as bar:
            for deltas in self.stream(ids, params, answers=answers):
                bar.update(sum(delta.finish_reason is not None for delta in deltas))
        return answers

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """The model's next message in one conversation, or in each of several. messages: as in /v1/chat/completions, with texts as
        contents. tools: as there; an answer's `message` has the calls, whose arguments fit the tools' schemas if the template tells how
        they are written, unless `params` have a format. params, progress: as `generate` takes them. Raises UserError as `generate`
        does, for a model without a chat template, and for a strict schema that cannot be enforced."""
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer, so it has no chat template; give token ids to generate")
        talks: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        for message in (message for talk in talks for message in talk):
            if not (isinstance(message, Mapping) and (isinstance(message.get("content"), str) or message.get("tool_calls"))):
                raise UserError(f"a message is a dict with a role and a text as content, not {shown(message)}")
        if not tools:
            return self.generate([encode_chat(self.tokenizer, talk) for talk in talks], params, progress=progress)
        special, read = call_reader(self.tokenizer, tools)
        prompts = [encode_chat(self.tokenizer, talk, tools=list(tools)) for talk in talks]
        each = [replace(one, kept_special=[*one.kept_special, *special.values()]) for one in _one_each(params, len(prompts))]
        each = [_with_calls(self.tokenizer, tools, prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        answers = self.generate(prompts, each, progress=progress)
        for answer in answers:
            answer.message, called = read(answer.prompt_ids, answer.text)
            answer.finish_reason = "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason
        return answers

    def embed(self, prompts: str | Sequence[str] | Sequence[Sequence[int]]) -> list[list[float]]:
        """The vector of each text or list of token ids, pooled and normalized as the checkpoint's files of sentence-transformers say,
        whose prompt comes before texts; without such files the mean, normalized. Raises UserError for a prompt that does not fit."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        ids = self._encode_all(self.embedder.prompt + one if isinstance(one, str) else one for one in texts)
        self._check_idle()
        with self._everywhere("embed", ids):
            return self._vectors(ids) if ids else []

    def _vectors(self, ids: list[list[int]]) -> list[list[float]]:
        """`embed` on this rank."""
        most = self.embedder.longest or self.model.config.max_seq_len
        if (longest := max(map(len, ids))) > most:
            raise UserError(f"a text has {longest} tokens, and the model makes vectors of at most {most}; shorten it")
        check_prompts(self.model.config, ids, [0] * len(ids))
        params = SamplingParams(max_tokens=1, pooling=self.embedder.pooling)
        engine, found = self._engine_for(ids, [params] * len(ids)), dict[int, Tensor]()
        try:
            self._submit(engine, ids, [params] * len(ids))
            while engine.has_work():
                for output in engine.step():
                    found[int(output.request_id)] = torch.frombuffer(bytearray(output.embedding or b""), dtype=torch.float32)
                if refused := engine.refused:
                    engine.refused = []  # a later call must not find them
                    raise OverflowedError(refused[0].message)
        finally:
            for i in range(len(ids)):
                engine.abort(Abort(str(i)))
        return [(F.normalize(found[i], dim=0) if self.embedder.normalize else found[i]).tolist() for i in range(len(ids))]

    def _submit(self, engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            if refused := engine.submit(Submit(str(i), prompt, one, adapter=ADAPTER if self.adapters else "")):
                raise UserError(refused.message)

    async def astream(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> AsyncGenerator[list[Delta]]:
        """`stream` for an event loop, which goes on while a step is computed."""
        steps = self.stream(prompts, params)
        step = asyncio.ensure_future(asyncio.to_thread(next, steps, None))
        try:
            while (deltas := await asyncio.shield(step)) is not None:
                yield deltas
                step = asyncio.ensure_future(asyncio.to_thread(next, steps, None))
        finally:
            await asyncio.wait([step])  # amid which the caller may leave
            steps.close()

    def stream(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timing: Timing | None = None,
        answers: Sequence[Completion] | None = None,
    ) -> Generator[list[Delta]]:
        """Yields, after each step, the new part of each answer. If the caller closes the generator, all answers end. prompts, params: as
        `generate` takes them. answers: one for each prompt, extended in place. timing: filled in place.

        Raises UserError at the first iteration: for a prompt that does not fit, and while another call has not ended. Raises
        OverflowedError after the other answers have ended, if the model's numbers overflow for one."""
        ids = self._encode_all(prompts)
        self._check_idle()
        with self._everywhere("stream", ids, params):
            steps = self._steps(ids, params, timing, answers)
            try:
                while True:
                    self._tell("step")
                    if (deltas := next(steps, None)) is None:
                        return
                    yield deltas
            except GeneratorExit:
                self._tell("close")
                steps.close()
                raise

    def _steps(
        self,
        ids: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        timing: Timing | None,
        answers: Sequence[Completion] | None,
    ) -> Generator[list[Delta]]:
        """`stream` on this rank."""
        each = [self._with_ids(one, prompt) for one, prompt in zip(_one_each(params, len(ids)), ids, strict=True)]
        answers = [Completion(prompt) for prompt in ids] if answers is None else answers
        if not ids:
            return
        check_prompts(self.model.config, ids, [one.max_tokens for one in each])
        engine = self._engine_for(ids, each)
        streams = [AnswerStream(i, self.tokenizer, ids[i], each[i]) for i in range(len(ids))]
        self._streaming = True
        try:
            self._submit(engine, ids, each)
            yield from _run(engine, streams, answers, timing or Timing())
        finally:
            self._streaming = False
            for i, answer in enumerate(answers):
                if answer.finish_reason is None:
                    engine.abort(Abort(str(i)))
        self.model.comm.check()

    @torch.inference_mode()
    def score(self, prompt: str | Sequence[int]) -> Scores:
        """Log-probabilities of a text's tokens. Raises UserError for a prompt that does not fit, OverflowedError if one is not finite."""
        require_causal(self.model.config)
        if (kv_dtype := self.limits.kv_dtype if self.limits else self.kv_dtype) != "auto":
            raise UserError(f"score {WITHOUT_CACHE}; leave kv_dtype={kv_dtype!r} out")
        ids = self.encode(prompt)
        check_prompts(self.model.config, [ids], [0])
        with self._everywhere("score", ids):
            return self._scores(ids)

    def _scores(self, ids: list[int]) -> Scores:
        """`score` on this rank."""
        tokens = torch.tensor([ids], device=self.world.device)
        context = Causal(len(ids), tokens.device)
        context.adapters = self.adapters.all_rows(len(ids)) if self.adapters else None
        hidden = self.model.hidden(tokens, context)[0]
        scores = Scores([None], [])
        for first in range(0, len(ids), SCORE_CHUNK):
            logits = self.model.logits(hidden[first : first + SCORE_CHUNK])
            targets = tokens[0, first + 1 : first + 1 + len(logits)]
            scores.argmax += logits.argmax(-1).tolist()
            found = log_softmax(logits).gather(-1, F.pad(targets, (0, len(logits) - len(targets)))[:, None])[:, 0]
            if not bool(found.isfinite().all()):
                raise OverflowedError(OVERFLOW)
            scores.logprobs += found[: len(targets)].tolist()
        return scores

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt. Raises UserError for what is neither a text nor ids, and for a text if the model has no tokenizer."""
        return self._encode_all([prompt])[0]

    def _encode_all(self, prompts: Iterable[str | Sequence[int]]) -> list[list[int]]:
        if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
            raise UserError(f"prompts must be a text, or a list of texts and lists of token ids, not {shown(prompts)}")
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise UserError("this model has no tokenizer, so it takes no text; give token ids")
        encoded = iter(encode_texts(self.tokenizer, texts) if self.tokenizer else ())
        rule = "a prompt must be a text or a list of token ids"
        return [next(encoded) if isinstance(prompt, str) else _whole_numbers(prompt, rule) for prompt in given]

    def step_tokens(self, prompts: Sequence[Sequence[int]]) -> int:
        """The most tokens of a step that computes these prompts and their answers. For engines without `limits`."""
        sequences = min(len(prompts), MAX_SEQUENCES)
        most, ranks = PREFILL_TOKENS, self.world.world_size
        if ranks > 1:  # longer all-reduces are neither measured nor fused
            most = min(most, LARGEST_MEASURED)
        if ranks > 2:  # longer steps, which have no graph, were far slower with a small model (docs/performance.md)
            most = min(most, largest_graph(ranks))
        # a step that decodes all sequences must fit, too
        return max(min(sum(map(len, prompts)), most), sequences * (1 + self.draft_tokens))

    def _with_ids(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """With the ids of what ends an answer or its reasoning, and of what it must not have. Raises UserError."""
        if params.thinking_token_budget is not None:
            reasoning = reasoning_of(self.tokenizer.pick_template(None, with_tools=False)) if self.tokenizer else None
            if self.tokenizer is None or reasoning is None:
                raise UserError(
                    "thinking_token_budget has no effect, because the chat template marks no reasoning; leave it out"
                )
            budget = budget_after(self.tokenizer, reasoning, params.thinking_token_budget, prompt)
            params = replace(params, thinking=budget)
        for name in FORMATS:
            if (value := getattr(params, name)) is not None:
                params = replace(params, **{name: None, "grammar": format_grammar(name, json.dumps(value))})
        if params.bad_words:
            if self.tokenizer is None:
                raise UserError("this model has no tokenizer, so bad_words has no effect; give token ids in banned")
            params = replace(params, banned=[*params.banned, *banned_by(self.tokenizer, params.bad_words)])
        if params.ignore_eos or self.eos_ids <= set(params.stop_token_ids):
            return params
        return replace(params, stop_token_ids=sorted(self.eos_ids | set(params.stop_token_ids)))

    def _engine_for(self, prompts: list[list[int]], params: list[SamplingParams]) -> Engine:
        """The engine of `limits`, or one that is just large enough for these prompts. It is kept for later calls
        that need the same limits."""
        limits = self.limits
        if limits is None:
            longest = max(len(prompt) + one.max_tokens for prompt, one in zip(prompts, params, strict=True))
            limits = EngineLimits(
                max_model_len=longest,
                max_num_seqs=min(len(prompts), MAX_SEQUENCES),
                max_batch_tokens=self.step_tokens(prompts),
                kv_memory=0.9,
                kv_dtype=self.kv_dtype,
                whole_sequences=True,
                draft_tokens=self.draft_tokens,
            )
        if self._engine is None or self._engine[0] != limits:
            self._engine = None  # frees its cache before the new one is allocated
            self._engine = limits, Engine(self.model, self.tokenizer, limits, self.world, self.draft, self.adapters)
            if self.draft is not None:  # else the first prompt's time would contain it
                self._engine[1].speculation.prepare()
        return self._engine[1]


def _check_limits(limits: EngineLimits | None, speculate: str | None, kv_dtype: str | None, draft_tokens: int | None) -> None:
    """Raises UserError for arguments of `LLM` that have no effect with, or without, these limits."""
    if limits is not None:
        _refuse_given("with limits, give it to EngineLimits", kv_dtype=kv_dtype, draft_tokens=draft_tokens)
        if speculate and not limits.draft_tokens:
            raise UserError("speculate has no effect here: with limits, also give EngineLimits(draft_tokens=7)")
    elif not speculate:
        _refuse_given('also give speculate, such as "ngram"', draft_tokens=draft_tokens)


def _refuse_given(instead: str, **arguments: str | int | None) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UserError(f"{name} has no effect here: {instead}")


def _followers(given: Mapping[str, Any]) -> Followers | None:
    """The ranks beside this one that an `LLM` with these arguments starts. Raises UserError for other arguments that do not go with tp."""
    tp, own = given["tp"], ("tp", "tokenizer", "world")
    if tp is None or tp == int(os.environ.get("WORLD_SIZE", 1)):
        return None
    if tp < 1 or given["tokenizer"] is not None or given["world"] is not None:
        raise UserError("tp is a number of ranks from 1, and goes with the name of a model, not with a tokenizer or a world")
    return Followers(tp, {name: value for name, value in given.items() if name not in own})


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        checked = _with_checked_ids(params or SamplingParams())
        return [checked.of_answer(i) for i in range(count)]
    if not (isinstance(params, Sequence) and all(isinstance(one, SamplingParams) for one in params)):
        raise UserError(f"params must be one SamplingParams, or a list with one for each prompt, not {shown(params)}")
    if len(params) != count:
        raise UserError(f"{len(params)} sampling parameters for {count} prompts; give one for each, or one for all")
    return [_with_checked_ids(one) for one in params]


def _with_calls(tokenizer: Tokenizer, tools: Sequence[Any], prompt: list[int], params: SamplingParams) -> SamplingParams:
    """With the grammar of the tools' calls, unless the answer has a format of its own, or does not end. prompt: its token ids."""
    if params.ignore_eos or params.grammar or any(getattr(params, name) is not None for name in FORMATS):
        return params
    template = tokenizer.pick_template(None, with_tools=True)
    reasoning, inside = reasoning_after(tokenizer, reasoning_of(template), prompt)
    marks = Marks(reasoning.start, reasoning.end, inside) if reasoning else None
    grammar, strict = calls_grammar(tokenizer, template, json.dumps(tools), marks)
    return replace(params, grammar=grammar, late_grammar=bool(grammar), grammar_optional=bool(grammar) and not strict)


def _with_checked_ids(params: SamplingParams) -> SamplingParams:
    """The same parameters. What their lists contain is not checked when they are made, which a server does too often."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "prediction"):
        _whole_numbers(getattr(params, name) or (), f"{name} must have token ids, which are whole numbers")
    for ids in params.banned:
        _whole_numbers(ids, "banned must have lists of token ids, which are whole numbers")
    return params


def _whole_numbers(values: Iterable[int], rule: str) -> list[int]:
    try:
        return list(map(operator.index, values))
    except TypeError:
        raise UserError(f"{rule}, not {shown(values)}") from None


def _run(engine: Engine, streams: list[AnswerStream], answers: Sequence[Completion], timing: Timing) -> Generator[list[Delta]]:
    start, started, overflowed = time.perf_counter(), False, list[str]()
    while engine.has_work() or engine.preparing:
        engine.admit()
        outputs = engine.step() if engine.has_work() else []
        failed, engine.refused = engine.refused, []  # a later call must not find them
        for one in failed:
            if one.code != "overflow":
                raise UserError(one.message)
            overflowed.append(one.request_id)
        if not outputs and engine.preparing:
            time.sleep(COMPILING_SECONDS)
        deltas = [delta for output in outputs if (delta := streams[int(output.request_id)].push(output)) is not None]
        for delta in deltas:
            _add(answers[delta.index], delta)
            if delta.finish_reason == "stop":  # perhaps at a stop string, which the engine does not see
                engine.abort(Abort(str(delta.index), streams[delta.index].text.token_count))
        seconds = time.perf_counter() - start
        if started:
            timing.steps.append(seconds)
            timing.tokens += sum(len(output.token_ids) for output in outputs)
        else:
            timing.prefill += seconds
            started = all(answer.token_ids for answer in answers)  # no longer if one overflows: a time without meaning
        yield deltas
        start = time.perf_counter()
    if overflowed:
        raise OverflowedError(f"prompt {', '.join(overflowed)}: {OVERFLOW}" if len(streams) > 1 else OVERFLOW)


def _add(answer: Completion, delta: Delta) -> None:
    answer.text += delta.text
    answer.token_ids += delta.token_ids
    answer.logprobs += delta.logprobs or []
    answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
    answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> None:
    """Raise UserError unless the model can continue each prompt by as many tokens."""
    for prompt, count in zip(prompts, new_tokens, strict=True):
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        check_ids(prompt, config.vocab_size)
        if len(prompt) + count > config.max_seq_len:
            raise UserError(
                f"the prompt's {len(prompt)} tokens and {count} new ones exceed the model's context of {config.max_seq_len}; "
                "shorten the prompt or ask for fewer (--max-new-tokens; in Python max_tokens)"
            )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    """The ids of each text. Raises UserError for what a tokenizer makes endless or enormous."""

    def encode() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]

    return encode() if tokenizer.covers is not None else bounded("the prompt", encode, characters=sum(map(len, texts)))


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
    """The ids of a conversation. options: of its template. Raises UserError for what a template or a tokenizer makes endless or
    enormous."""
    length = sum(len(message.get("content") or "") for message in messages)
    return bounded("the conversation", partial(tokenizer.encode_chat, **options), messages, characters=length)


def read_tokenizer(model: str, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer beside a checkpoint; None without one, as for a preset."""
    folder = model_folder(model)
    if has_random_weights(model) or find_tokenizer(folder) is None:
        return None
    tokenizer = load_tokenizer(folder)
    check_fits(tokenizer, config.vocab_size)
    for remark in tokenizer.remarks:
        note(f"{folder}: {remark}")
    return tokenizer

"""Embeddings: the engine's pooled hidden states are those of transformers, and of one forward pass, in any batch."""

import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from tokenizers import processors
from torch import Tensor

from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from checkpoints.weights import check_source, fill_model
from comms import Local
from engine import LLM
from engine.core import Engine
from engine.pooling_file import checkpoint_embedder
from engine.protocol import Abort, Pooling, Refused, SamplingParams, Submit
from engine.sampler import SamplingState, pool
from engine.sequence import Chunk, Sequence
from errors import UserError
from layers.attention import Causal
from model import Transformer
from tests import MODELS
from tests.engine.test_engine import (
    ALONE,
    CPU,
    KINDS,
    TOLERANCE,
    assert_same,
    config_of,
    engine_of,
    load,
    random_model,
    random_submits,
)
from tests.engine.test_runner import as_on_a_gpu
from tests.support.ranks import Ranks
from tests.test_tokenizer import LINES, train_bytes, write_json
from text.tokenizer_files import load_tokenizer
from tp import World


def wanted(count: int, longest: int = 50) -> list[Submit]:
    """Prompts of all lengths; half begin like an earlier one."""
    prompts = [s.prompt_ids for s in random_submits(count, longest=longest)]
    pooling: list[Pooling] = [random.choice(["mean", "last"]) for _ in prompts]
    return [Submit(f"e{i}", ids, SamplingParams(pooling=pooling[i])) for i, ids in enumerate(prompts)]


def embeddings(engine: Engine, submits: list[Submit], preempt: bool = False) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Run all requests to their end. Returns vectors and, of those that generate, tokens. preempt: also where nothing has to be
    preempted."""
    vectors, tokens = dict[str, Tensor](), {s.request_id: list[int]() for s in submits if s.params.pooling is None}
    before = engine.stats().generation_tokens
    for submit in submits:
        assert engine.submit(submit) is None
    while engine.has_work():
        scheduler = engine.scheduler
        if preempt and engine._ahead is None and scheduler.running and random.random() < 0.2:
            scheduler._preempt(random.choice(scheduler.running))
        for output in engine.step():
            if output.embedding is None:
                tokens[output.request_id] += output.token_ids
                continue
            assert output.request_id not in vectors and not output.token_ids and output.finish_reason == "stop"
            vectors[output.request_id] = torch.frombuffer(bytearray(output.embedding), dtype=torch.float32)
    assert engine.scheduler.blocks.used == 0 and not engine.refused
    assert engine.stats().generation_tokens - before == sum(map(len, tokens.values()))
    return vectors, tokens


@torch.inference_mode()
def expected(model: Transformer, submit: Submit) -> Tensor:
    """(C,) from one forward pass without a cache."""
    ids = submit.prompt_ids
    hidden = model.norm(model.hidden(torch.tensor([ids]), Causal(len(ids), CPU)))[0]
    return hidden.mean(0) if submit.params.pooling == "mean" else hidden[-1]


def check(found: dict[str, Tensor], model: Transformer, submits: list[Submit], rounding: float = TOLERANCE) -> None:
    pooled = [s for s in submits if s.params.pooling is not None]
    assert found.keys() == {s.request_id for s in pooled}
    for submit in pooled:
        torch.testing.assert_close(found[submit.request_id], expected(model, submit), atol=rounding, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "around", "causal"),
    [("Qwen3", "$A <|end|>", True), ("Mistral", "<|begin|> $A <|end|>", True), ("Qwen2", "$A <|end|>", False)],
)
def test_a_text_has_the_vector_of_sentence_transformers(
    family: str, around: str, causal: bool, tmp_path: Path, seed: int
) -> None:
    """Checkpoints like Qwen3-Embedding, e5-mistral and gte-Qwen2: an end behind each text, the last token's state, a prompt."""
    tokenizer = train_bytes(["<|begin|>", "<|end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = {"eos_token": "<|end|>", "pad_token": "<|end|>", "add_bos_token": False, "add_eos_token": True}
    write_json(tmp_path / "tokenizer_config.json", flags)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=tokenizer.get_vocab_size(), head_dim=16, eos_token_id=1, **sizes, **({} if causal else {"is_causal": False})
    )
    theirs = getattr(transformers, f"{family}Model")(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})
    prompt = random.choice(["", "Instruct: find it\nQuery: "])
    names = {"prompts": {"query": prompt}, "default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", names)

    world = World(0, 1, CPU, Local())
    source = check_source(str(tmp_path), ours := model_config(str(tmp_path), None, 1), world, torch.float32, embeds=True)
    model = fill_model(str(tmp_path), source, ours, world, torch.float32, seed=0)
    own, embedder, texts = load_tokenizer(tmp_path), checkpoint_embedder(str(tmp_path)), list({*random.sample(LINES, 3), ""})
    params = SamplingParams(pooling=embedder.pooling)
    submits = [Submit(text, own.encode(embedder.prompt + text), params) for text in texts]
    found, _ = embeddings(engine_of(model), submits)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in texts:
        with torch.inference_mode():
            hidden = theirs(**reference(prompt + text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state
        torch.testing.assert_close(found[text], hidden[0, -1], atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_beside_answers_in_chunks_with_preemptions_and_drafts(kind: int, in_turn: Callable[..., Any], seed: int) -> None:
    model = random_model(config_of(in_turn(KINDS[kind], kind)))
    answered = random_submits(4, longest=24, max_tokens=8)
    submits = wanted(8) + answered
    random.shuffle(submits)
    limits = dict(max_num_seqs=6, max_batch_tokens=19, draft_tokens=in_turn((0, 3), kind))
    with as_on_a_gpu() if in_turn((False, True), kind) else nullcontext():
        found, tokens = embeddings(engine_of(model, 16, **limits), submits, preempt=True)
    check(found, model, submits)
    for submit in answered:
        assert_same(model, submit, tokens[submit.request_id])


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_in_both_directions_whole_prompts_in_any_batch(
    on_a_gpu: bool, in_turn: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    """A model with `is_causal` false has the vectors of transformers, whatever is in a step, and answers nothing."""
    model = random_model(replace(config_of("standard"), causal=False))
    save_checkpoint(model, tmp_path, torch.float32)
    reference = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    submits = wanted(12)
    with as_on_a_gpu() if on_a_gpu else nullcontext():
        engine = engine_of(model, max_num_seqs=in_turn((1, 5), int(on_a_gpu)), max_batch_tokens=64, draft_tokens=3)
        engine.capture()
        found, _ = embeddings(engine, submits)
        again, _ = embeddings(engine, submits[:3])
    for submit in submits:
        with torch.inference_mode():
            hidden = reference(torch.tensor([submit.prompt_ids])).last_hidden_state[0]
        pooled = hidden.mean(0) if submit.params.pooling == "mean" else hidden[-1]
        torch.testing.assert_close(found[submit.request_id], pooled, atol=TOLERANCE, rtol=1e-4)
    check(found | again, model, submits)  # `Causal`, for quantization, attends in both directions, too
    for submit, words in (
        (Submit("a", [1, 2], SamplingParams()), "only makes embeddings"),
        (Submit("b", [1] * 65, SamplingParams(pooling="last")), "context of 64"),
    ):
        refused = engine.submit(submit)
        assert isinstance(refused, Refused) and words in refused.message


def test_a_mean_takes_nothing_from_the_prefix_cache_but_fills_it(seed: int) -> None:
    model, ids = random_model(config_of("hybrid:2")), [random.randrange(101) for _ in range(40)]
    engine = engine_of(model)
    for pooling, cached in (("mean", 0), ("mean", 0), ("last", 36), (None, 36)):
        submit = Submit("a", ids, SamplingParams(pooling=pooling, max_tokens=1, temperature=0))
        assert engine.submit(submit) is None
        [output] = engine.step()
        assert output.cached_tokens == cached
        if pooling:
            vector = torch.frombuffer(bytearray(output.embedding or b""), dtype=torch.float32)
            check({"a": vector}, model, [submit])


def test_chunks_do_not_change_a_bit_of_a_sum(seed: int) -> None:
    """The sums are exact: only the hidden states themselves may differ."""
    model = random_model(config_of("standard"))
    engines = [engine_of(model, max_batch_tokens=n) for n in (7, 1000)]
    rows = {position: torch.randn(32) for position in range(60)}
    sums = []
    for engine in engines:
        engine.runner._hidden = lambda tokens, context, some=None: (  # type: ignore[method-assign]
            torch.stack([rows[p] for p in context.positions.tolist()]),
            [],
        )
        sums.append(embeddings(engine, [Submit("a", [1] * 60, SamplingParams(pooling="mean"))])[0]["a"])
    assert torch.equal(*sums)


def test_rows_of_vectors_are_found_behind_all_others(seed: int) -> None:
    """Behind parts of prompts, which draw nothing, and drafts, which draw several rows. A mean begins anew with its prompt."""
    for _ in range(30):
        chunks, last, hidden, wanted = list[Chunk](), list[Tensor](), list[Tensor](), list[Tensor]()
        for _ in range(random.randint(1, 6)):
            pooling = random.choice([None, "last", "mean"])
            length, draft = random.randint(1, 5), [] if pooling else [3] * random.randint(0, 3)
            samples = random.random() < 0.7 or bool(draft)
            sequence = Sequence("", [1] * length, length, SamplingParams(pooling=pooling), state=SamplingState())
            sequence.state.pooled = torch.ones(9, dtype=torch.int64)  # of an earlier computation
            rows = torch.randn(length + len(draft), 8)
            chunks.append(Chunk(sequence, 0, len(rows), samples, True, draft))
            hidden.append(rows)
            last += [rows[length - 1 :]] if samples else []
            if samples and pooling:
                wanted.append(rows[-1] if pooling == "last" else rows.mean(0))
        found = pool(lambda x: x, chunks, torch.cat([*last, torch.zeros(1, 8)]), torch.cat(hidden))
        assert (found is None) == (not wanted)
        if found is not None:
            torch.testing.assert_close(found.vectors, torch.stack(wanted))
            assert found.sequences == [c.sequence for c in chunks if c.samples and c.sequence.params.pooling]


def test_a_prompt_may_fill_context_and_cache_and_an_abort_ends_it(seed: int) -> None:
    model = random_model(config_of("standard"))
    engine = engine_of(model, 20, max_batch_tokens=16)  # which hold it alone
    full = Submit("full", [1] * 80, SamplingParams(pooling="mean"))
    check(embeddings(engine, [full])[0], model, [full])
    assert isinstance(engine.submit(Submit("b", [1] * 81, SamplingParams(pooling="last"))), Refused)
    assert engine.submit(full) is None
    engine.step()
    engine.abort(Abort("full"))
    assert not engine.has_work() and engine.scheduler.blocks.used == 0


def on_a_rank(world: World, directory: Path, submits: list[Submit]) -> dict[str, Tensor]:
    return embeddings(engine_of(load(world, directory), world=world, max_batch_tokens=23), submits)[0]


def test_ranks_give_the_same_as_one(ranks: Ranks, in_turn: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    """But for the upper bound: its ranks do not add their partial sums."""
    names = [name for kind in KINDS for name in kind if name != "upper-bound"]
    save_checkpoint(random_model(config_of(in_turn(names, 0))), tmp_path, torch.float32)
    submits = wanted(6)
    model = load(ALONE, tmp_path)
    for found in ranks.run(in_turn((2, 4), 1), on_a_rank, tmp_path, submits):
        check(found, model, submits)


def test_python_embeds_as_the_checkpoint_says_and_generates_in_any_case(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "tiny-standard", tmp_path, dirs_exist_ok=True)
    llm = LLM(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 3}')
    with pytest.raises(UserError, match="a text has 4 tokens, and the model makes vectors of at most 3"):
        llm.embed([[1, 2, 3, 4]])
    assert llm.embed([]) == [] and len(llm.embed([[1, 2, 3]])[0]) == llm.model.config.hidden_size
    with patch.object(llm.engine, "step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        llm.embed([[1, 2, 3]])
    assert llm.engine and not llm.engine.has_work()  # a later call must not find it
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    llm = LLM(tmp_path)
    assert llm.generate("Once", SamplingParams(max_tokens=1))[0].token_ids
    with pytest.raises(UserError, match="modules that are not computed here"):
        llm.embed("Once")

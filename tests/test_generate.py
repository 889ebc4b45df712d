"""The command line of generate.py: what it prints to which stream, on one and several ranks, and what the models can do."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import generate as command_module
from checkpoints.presets import model_config, preset
from checkpoints.weights import build_model
from comms import Local
from engine import LLM, SamplingParams
from engine.llm import Timing
from errors import UserError
from layers.attention import Causal
from model import Transformer
from scripts.corpus.documents import documents
from server import launch as launch_server
from server.settings import load_settings
from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import HYBRID, MODELS, Here, environment, launch
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer
from tp import World

KEYS = [
    "text", "token_ids", "prompt_token_ids", "finish_reason", "variant", "world_size",
    "prefill_ms", "decode_ms_per_token", "tokens_per_second", "weight_gb_per_second", "peak_memory_gb",
]  # fmt: skip
CHECKPOINTS = ["standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x"]
GREEDY = ("--temperature", 0)
NEW_TOKENS = 24


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capfd)


def load(name: str) -> tuple[Transformer, Tokenizer]:
    folder = MODELS / f"tiny-{name}"
    world = World(0, 1, torch.device("cpu"), Local())
    model = build_model(str(folder), model_config(str(folder), None, 1), world, torch.float32)
    return model, load_tokenizer(folder)


@pytest.fixture(scope="module")
def hybrid() -> tuple[Transformer, Tokenizer]:
    return load("hybrid")


# --- greedy text is the same on every number of ranks --------------------------------------------------------------------


@torch.inference_mode()
def greedy_without_cache(model: Transformer, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The next `count` greedy tokens, with the whole text recomputed for each, and the smallest lead of a best logit over the
    second."""
    ids, lead = list(prompt), float("inf")
    for _ in range(count):
        top = model(torch.tensor([ids]), Causal(len(ids), torch.device("cpu")))[0, -1].topk(2)
        lead = min(lead, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return ids[len(prompt) :], lead


@pytest.fixture(scope="module")
def story(hybrid: tuple[Transformer, Tokenizer], session_seed: int) -> tuple[str, list[int]]:
    """The beginning of a held-out story and its greedy continuation. Rounding cannot change any token of it."""
    model, tokenizer = hybrid
    for document in documents(session_seed, 50, split="heldout", kind="story"):
        prompt = " ".join((document.text or "").split()[: random.Random(session_seed).randint(4, 12)])
        ids, lead = greedy_without_cache(model, tokenizer.encode(prompt), NEW_TOKENS)
        if lead > 1e-3 and not set(ids) & set(tokenizer.eos_ids):
            return prompt, ids
    raise AssertionError("50 stories, and in each a token that rounding could change")


@pytest.mark.parametrize("place", range(2))
def test_greedy_tokens_are_the_same_on_any_number_of_ranks(
    place: int, in_turn: Callable[..., int], story: tuple[str, list[int]], hybrid: tuple[Transformer, Tokenizer]
) -> None:
    (prompt, expected), tokenizer, ranks = story, hybrid[1], in_turn((0, 2, 4), place)
    done = launch("--model", HYBRID, "--json", *GREEDY, "--max-new-tokens", NEW_TOKENS, "--prompt", prompt, ranks=ranks)
    assert done.code == 0, done.err
    assert list(done.record) == KEYS
    prompt_ids = tokenizer.encode(prompt)
    assert done.record["prompt_token_ids"] == prompt_ids
    assert done.record["token_ids"] == expected
    assert done.record["text"] == tokenizer.decode(prompt_ids + expected).removeprefix(tokenizer.decode(prompt_ids))
    assert done.record["finish_reason"] == "length"
    assert done.record["variant"] == "hybrid ladder (layers 4-7 of 8)"
    assert done.record["world_size"] == max(1, ranks)
    assert all(done.record[key] > 0 for key in KEYS[6:])
    assert re.search(rf"{max(1, ranks)} rank\(s\) on cpu", done.err)
    assert len(re.findall("ready after", done.err)) == 1, "one rank speaks"
    if not ranks:
        assert re.fullmatch(r"(?:models|/).*: .* ready after .*\n\[batch 0\] prefill .*\nA large copy .*\n", done.err)


def test_speculation_gives_the_same_tokens(story: tuple[str, list[int]], in_turn: Callable[..., Any]) -> None:
    prompt, expected = story
    source = in_turn(("ngram", MODELS / "tiny-parallel", HYBRID), 0)
    args = ("--model", HYBRID, "--json", *GREEDY, "--max-new-tokens", NEW_TOKENS, "--speculate", source, "--draft-tokens", 4)
    done = launch(*args, "--prompt", prompt, ranks=2)
    assert done.code == 0, done.err
    assert done.record["token_ids"] == expected


# --- streams and files ---------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_the_rest_to_stderr(here: Here, story: tuple[str, list[int]]) -> None:
    prompt, ids = story
    args = ("--model", HYBRID, "--prompt", prompt, *GREEDY, "--max-new-tokens", NEW_TOKENS)
    done, record = here(*args), here(*args, "--json").record
    assert done.code == 0
    assert done.out == record["text"] + "\n"
    assert prompt in done.err.splitlines(), "the reader sees what the text continues"
    assert record["token_ids"] == ids


def test_only_one_rank_prints_the_help(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    first = here("--help")
    monkeypatch.setenv("RANK", "1")
    second = here("--help")
    assert (first.code, second.code, second.out) == (0, 0, "")
    assert first.out.startswith("usage:")


def test_prompt_file_and_prompt_ids_say_the_same_as_prompt(
    here: Here, hybrid: tuple[Transformer, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "One day Zoë found a café, 日本, 🦊"
    ids = hybrid[1].encode(text)
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    piped = tmp_path / "piped"
    piped.write_text(text, encoding="utf-8")
    common = ("--model", HYBRID, "--json", *GREEDY, "--max-new-tokens", 10)
    with piped.open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        ways = [
            here(*common, "--prompt", text),
            here(*common, "--prompt-file", file),
            here(*common, "--prompt-file", "-"),
            here(*common, "--prompt-ids", ",".join(map(str, ids))),
        ]
    assert [way.record["prompt_token_ids"] for way in ways] == [ids] * 4
    assert [way.record["token_ids"] for way in ways] == [ways[0].record["token_ids"]] * 4


@pytest.mark.parametrize("ranks", [0, 2])
def test_standard_input_is_a_prompt(hybrid: tuple[Transformer, Tokenizer], ranks: int, tmp_path: Path) -> None:
    texts = ["Once upon a time", "What is 17 plus 25?", "Zoë, 日本"]
    common = (HYBRID, "--json", *GREEDY, "--max-new-tokens", 4)
    whole = "\n".join(texts) + "\n"
    for way in [[], ["--prompt", "-"], ["--prompt-file", "-"]][:: 2 if ranks else 1]:
        done = launch(*common, *way, ranks=ranks, stdin=whole)
        assert done.record["prompt_token_ids"] == hybrid[1].encode(whole), done.err
    lines = f"{texts[0]}\n\n  \n{texts[1]}\r\n{texts[2]}"
    more = ("--prompt-lines", "--batch-size", 4, "--num-samples", 2)
    done = launch(*common, *more, ranks=ranks, stdin=lines)
    assert [one["prompt_token_ids"] for one in done.records] == [hybrid[1].encode(text) for text in texts for _ in range(2)]
    alone = [launch(*common, "--prompt", text).record["token_ids"] for text in texts[: 1 if ranks else 3]]
    assert [one["token_ids"] for one in done.records][::2][: len(alone)] == alone
    for nothing in ([], ["--prompt", "-"], ["--prompt-lines"]):
        done = launch(*common, *nothing, ranks=ranks, stdin="" if nothing != ["--prompt-lines"] else " \n\n")
        assert done.code == 2 and done.err.startswith("error: no prompt, or an empty one; give --prompt"), done.err


def test_lines_are_scored_one_by_one(here: Here, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("Once upon\na time there was\n")
    alone = [here("--model", HYBRID, "--score", "--prompt", text).record for text in ("Once upon", "a time there was")]
    assert here("--model", HYBRID, "--score", "--prompt-lines", "--prompt-file", file).records == alone
    assert "--prompt-lines reads a text" in here.refuses("--model", HYBRID, "--prompt-lines", "--prompt-ids", "1")


def test_a_pipe_that_ranks_of_torchrun_would_share_is_refused() -> None:
    read, write = os.pipe()
    os.close(write)
    command = [sys.executable, "generate.py", HYBRID, "--device", "cpu"]
    done = quick_start.run(
        command, stdin=read, cwd=ROOT, env=environment(RANK=0, WORLD_SIZE=1), capture_output=True, text=True, timeout=300
    )
    os.close(read)
    assert done.returncode == 2 and done.stderr.startswith("error: standard input cannot be read as text ("), done.stderr


# --- samples -------------------------------------------------------------------------------------------------------------


def test_the_cache_of_a_batch_that_is_not_full() -> None:
    prompts, config = [[1] * 3, [1] * 9], preset("tiny")
    for size, together in ((8, 2), (1, 1)):
        args: Any = SimpleNamespace(score=False, batch_size=size, max_new_tokens=5)
        assert command_module.Job(args, config, None, prompts, []).cache_tokens == together * (9 + 5)
    args.score = True
    assert command_module.Job(args, config, None, prompts, []).cache_tokens == 0
    args.score = False
    assert command_module.Job(args, config, None, [], []).cache_tokens == config.max_seq_len, "a conversation"


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_is_only_looked_up_is_not_read(tied: bool) -> None:
    model = Transformer(replace(preset("tiny"), tie_embeddings=tied), Local(), torch.device("cpu"), torch.bfloat16)
    read = sum(p.nbytes for name, p in model.named_parameters() if tied or name != "embedding.weight")
    speed = command_module.measure(
        model, Timing(prefill=0.1, steps=[0.5, 0.25, 0.5], tokens=6), World(0, 1, torch.device("cpu"), Local())
    )
    assert speed["weight_gb_per_second"] == round(read / 0.5 / 1e9, 3) and speed["tokens_per_second"] == 4.0


def test_a_sample_is_the_same_alone_and_in_a_batch(here: Here, seed: int) -> None:
    common = ("--model", HYBRID, "--json", "--prompt", "Once upon a time", "--temperature", 1.1, "--max-new-tokens", 25)
    batched = here(*common, "--seed", seed, "--num-samples", 5, "--batch-size", 3).records
    single = here(*common, "--seed", seed, "--num-samples", 5).records
    alone = {i: here(*common, "--seed", seed + i).record for i in (1, 3)}
    # all are the same, unless rounding decides a tie
    assert sum(a["token_ids"] == b["token_ids"] for a, b in zip(batched, single, strict=True)) >= 4
    assert any(single[i]["token_ids"] == record["token_ids"] for i, record in alone.items())
    assert len({tuple(r["token_ids"]) for r in single}) == 5
    assert all(list(r) == KEYS for r in batched)


def test_batches_without_json_are_printed_one_after_the_other(here: Here, seed: int) -> None:
    args = ("--model", HYBRID, "--prompt", "Once", "--seed", seed, "--max-new-tokens", 5, "--num-samples", 3, "--batch-size", 2)
    done, records = here(*args), here(*args, "--json").records
    assert done.out == "".join(f"--- {r['finish_reason']}\n{r['text']}\n" for r in records)


def test_stop_strings_end_the_text_before_them(here: Here, story: tuple[str, list[int]]) -> None:
    prompt, _ = story
    args = ("--model", HYBRID, "--json", "--prompt", prompt, *GREEDY, "--max-new-tokens", NEW_TOKENS)
    whole = here(*args).record
    middle = len(whole["text"]) // 2
    stop = whole["text"][middle : middle + 5]
    cut = here(*args, "--stop", "🦊 never", "--stop", stop).record
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < NEW_TOKENS


def a_sum(rng: random.Random) -> tuple[str, str]:
    document = next(documents(rng.randrange(2**31), 1, split="heldout", kind="arithmetic"))
    return document.prompt_messages[-1]["content"], document.answer


def test_eos_ends_an_answer_unless_it_is_ignored(here: Here, seed: int, hybrid: tuple[Transformer, Tokenizer]) -> None:
    question, _ = a_sum(random.Random(seed))
    args = ("--model", HYBRID, "--json", "--chat", "--prompt", question, *GREEDY, "--max-new-tokens", 30)
    ended, ignored = here(*args).record, here(*args, "--ignore-eos").record
    assert ended["finish_reason"] == "stop"
    assert ended["token_ids"][-1] in hybrid[1].eos_ids
    assert ended["text"] == hybrid[1].decode(ended["token_ids"])
    assert (ignored["finish_reason"], len(ignored["token_ids"])) == ("length", 30)
    assert ignored["token_ids"][: len(ended["token_ids"])] == ended["token_ids"]


# --- scores --------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_transformers(here: Here, seed: int) -> None:
    folder = MODELS / "tiny-standard"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = " ".join(d.text or "" for d in documents(seed, 3, split="heldout", kind="story"))
    done = here("--model", folder, "--score", "--prompt", text, "--dtype", "float32")
    assert done.code == 0, done.err
    record: dict[str, Any] = json.loads(done.out)
    ids = torch.tensor([record["prompt_token_ids"]])
    assert ids[0].tolist() == load_tokenizer(folder).encode(text)
    with torch.inference_mode():
        logits = reference(ids).logits[0].double()
    logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert record["token_logprobs"][0] is None
    torch.testing.assert_close(torch.tensor(record["token_logprobs"][1:]).double(), logprobs, rtol=0, atol=1e-4)
    top = logits.topk(2).values
    clear = (top[:, 0] - top[:, 1] > 1e-3).tolist()
    same = [a == b for a, b in zip(record["logits_argmax"], logits.argmax(-1).tolist(), strict=True)]
    assert all(s for s, c in zip(same, clear, strict=True) if c)
    assert sum(clear) > 0.95 * len(clear)


def test_scores_do_not_depend_on_the_chunk(hybrid: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [random.randrange(hybrid[0].config.vocab_size) for _ in range(50)]
    llm = LLM(*hybrid)
    whole = llm.score(ids)
    monkeypatch.setattr("engine.llm.SCORE_CHUNK", 7)
    parts = llm.score(ids)
    assert parts.logprobs[1:] == pytest.approx(whole.logprobs[1:], abs=1e-5, rel=2e-6)
    assert [len(parts.logprobs), len(parts.argmax)] == [50, 50]


def test_a_checkpoint_without_a_tokenizer_runs_on_ids(
    here: Here, tmp_path: Path, hybrid: tuple[Transformer, Tokenizer]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(Path(HYBRID) / name)
    ids = hybrid[1].encode("Once upon a time")
    asked = "--prompt-ids", ",".join(map(str, ids))
    for more in (
        ("--score",),
        ("--json", *GREEDY, "--max-new-tokens", 5),
        ("--json", "--prompt-length", 5, "--max-new-tokens", 2),
    ):
        prompt = asked if "--prompt-length" not in more else ()
        with_text, without = here("--model", HYBRID, *prompt, *more), here("--model", bare, *prompt, *more)
        assert with_text.code == without.code == 0, without.err
        timed = {"text", "prefill_ms", "decode_ms_per_token", "tokens_per_second", "weight_gb_per_second", "peak_memory_gb"}
        first, second = ({k: v for k, v in done.record.items() if k not in timed} for done in (with_text, without))
        assert first == second
        assert without.record.get("text", "") == ""
    for text in (("--prompt", "Once"), ("--interactive",), ("--chat", "--prompt", "hi")):
        refused = here("--model", bare, *text)
        assert (refused.code, refused.out) == (2, "")
        assert re.fullmatch(r"error: [^\n]*bare has no tokenizer[^\n]*--prompt-ids[^\n]*\n", refused.err), refused.err
    with pytest.raises(
        UserError, match=r"^no tokenizer at [^\n]*bare: there is neither tokenizer.json nor tokenizer.model; [^\n]*$"
    ):
        launch_server.prepare(load_settings(["--model", str(bare)], {}), 1)


# --- interactive ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, 2])
def test_interactive_answers_each_line(ranks: int) -> None:
    asked = "What is 2 + 3?\n\nWhat is 10 + 10?\n"
    done = launch("--model", HYBRID, "--interactive", "--chat", *GREEDY, ranks=ranks, stdin=asked)
    assert done.code == 0, done.err
    answers = done.out.splitlines()
    assert len(answers) == 2
    assert re.search(r"\b5\b", answers[0])
    assert re.search(r"\b20\b", answers[1])


def test_a_conversation_goes_on_until_it_is_too_long(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, encode = list[list[str]](), command_module.encode_chat

    def watched(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
        asked.append([message["content"] for message in messages])
        return encode(tokenizer, messages)

    monkeypatch.setattr(command_module, "encode_chat", watched)
    lines = tmp_path / "lines"
    lines.write_text("a\nb\n" + "word " * 1500 + "\na\n/reset\na\n")
    with lines.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        done = here("--model", HYBRID, "--interactive", "--chat", *GREEDY, "--max-new-tokens", 5)
    reply = asked[1][1]
    assert done.code == 0 and done.out.startswith(f"{reply}\n") and done.out.endswith(f"{reply}\n{reply}\n")
    assert asked[1] == ["a", reply, "b"] and asked[3:] == [["a"], ["a"]] and len(asked) == 5
    assert done.err.count("the conversation starts anew") == 2


# --- variants, presets, tools --------------------------------------------------------------------------------------------


def test_another_variant_than_the_checkpoints_is_announced(here: Here, story: tuple[str, list[int]]) -> None:
    prompt, ids = story
    args = ("--model", HYBRID, "--json", "--prompt", prompt, *GREEDY, "--max-new-tokens", NEW_TOKENS)
    done = here(*args, "--variant", "standard")
    said = "warning: computing standard, for which the checkpoint was not trained; its text will be wrong"
    assert said in done.err  # on a busy machine behind a bar for the weights
    assert done.record["variant"] == "standard"
    assert done.record["token_ids"] != ids
    assert "warning" not in here(*args).err


def test_a_preset_runs_with_random_weights_and_prompts(here: Here, seed: int) -> None:
    args = ("--model", "tiny", "--json", "--prompt-length", 9, "--max-new-tokens", 4, "--num-samples", 2, "--seed", seed)
    first, second = here(*args).records
    assert len(first["prompt_token_ids"]) == len(second["prompt_token_ids"]) == 9
    assert first["prompt_token_ids"] != second["prompt_token_ids"]
    assert (first["text"], len(first["token_ids"])) == ("", 4)
    assert [r["token_ids"] for r in here(*args).records] == [first["token_ids"], second["token_ids"]]
    one = here("--model", "tiny", "--json", "--prompt-ids", "1,2", "--max-new-tokens", 1).record
    assert one["prefill_ms"] > 0
    assert [one[key] for key in ("decode_ms_per_token", "tokens_per_second", "weight_gb_per_second")] == [None] * 3
    ladder = here(*args, "--variant", "ladder")
    assert ladder.records[0]["variant"] == "ladder" and "checkpoint was trained" not in ladder.err


def test_profile_writes_a_trace_with_module_names(here: Here, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = here("--model", HYBRID, "--prompt", "Once", "--max-new-tokens", 3, "--profile", file)
    assert done.code == 0, done.err
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {f"layer {layer} {part}" for layer in range(8) for part in ("attention", "mlp")} <= names


def test_compiled_modules_say_the_same(here: Here, story: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions, each compiled for the prompt's many tokens and again for one, and never for another layer. Without the code of
    the default backend, which takes the most time and which tests/training/test_executor.py runs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    prompt, ids = story
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    done = here("--model", HYBRID, "--json", "--prompt", prompt, *GREEDY, "--max-new-tokens", NEW_TOKENS, "--compile")
    assert done.code == 0, done.err
    assert done.record["token_ids"] == ids
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


# --- what the embedded models can do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_embedded_models_add(name: str, seed: int) -> None:
    model, tokenizer = load(name)
    asked = list(documents(seed, 40, split="heldout", kind="arithmetic"))
    prompts = [tokenizer.encode_chat(document.prompt_messages) for document in asked]
    answers = LLM(model, tokenizer).generate(prompts, SamplingParams(temperature=0, max_tokens=400))
    right = sum(answer.text == document.answer for answer, document in zip(answers, asked, strict=True))
    assert right > 20


def test_a_machine_without_triton_generates_serves_and_trains() -> None:
    """PyTorch brings Triton along only for GPUs, and the tests' requirements have it."""
    program = """if True:
        import sys
        sys.modules["triton"] = None  # what imports it raises ImportError
        import server.launch, training.adapt, training.draft, training.train
        import generate
        sys.argv = "generate.py --model models/tiny-hybrid --device cpu --max-new-tokens 4".split() + ["--prompt", "Once"]
        generate.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr

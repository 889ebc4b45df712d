"""A preset served with random weights and the stand-in tokenizer; the scripts that measure it; reading weights with threads."""

import asyncio
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config, preset
from checkpoints.sources import SafetensorsSource, open_files
from checkpoints.weights import fill_all, load_model, places
from comms import Local
from comms.table import Table
from engine import LLM, SamplingParams
from errors import UserError
from model import Transformer
from scripts.bench.serving import startup
from scripts.lib.load_generator import Request, plan
from scripts.lib.servers import rung_server
from server.launch import prepare, process_age, warn_of_benchmarks
from server.settings import Settings
from tests import MODELS, ROOT
from tests.scripts.test_load_generator import FakeServer
from tests.support import quick_start
from tests.support.command_line import environment
from tests.support.server_process import ServerProcess
from text.tokenizer import ByteTokenizer, IncrementalDetokenizer
from text.tokenizer_files import tokenizer_of
from tp import World

HYBRID = MODELS / "tiny-hybrid"
CPU = torch.device("cpu")
SMALL_CACHE = ("--kv-memory", "64M")


# --- the stand-in tokenizer ------------------------------------------------------------------------------------------------


@settings(deadline=None)  # a busy machine may stop the test for a while
@given(st.text())
def test_a_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer(300)
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text


def test_ids_beyond_bytes_are_spelled_out() -> None:
    tokenizer = ByteTokenizer(1024)
    assert tokenizer.vocab_size == 1024 and not tokenizer.eos_ids and tokenizer.bos_id is None
    assert tokenizer.decode([104, 105, 256, 1023, 33]) == "hi⟨256⟩ ⟨1023⟩ !"
    assert tokenizer.decode([0xC3, 700]) == "\ufffd⟨700⟩ "
    with pytest.raises(UserError, match="outside the vocabulary"):
        tokenizer.decode([1024])
    with pytest.raises(UserError, match="too few"):
        ByteTokenizer(255)


def test_the_stand_in_has_a_plain_chat_template() -> None:
    tokenizer = ByteTokenizer(256)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.render_chat(chat) == "user: a\nassistant: b\nuser: c\nassistant: "
    assert tokenizer.render_chat(chat[:2], add_generation_prompt=False, continue_final_message=True) == "user: a\nassistant: b"
    assert tokenizer.render_chat(chat[:1], tools=[{"name": "f"}]).startswith('[{"name": "f"}]\nuser: a\n')


def test_the_tokenizer_of_a_preset_and_of_a_checkpoint() -> None:
    assert tokenizer_of("tiny:3").vocab_size == preset("tiny").vocab_size
    assert tokenizer_of("llama-3-70b").decode([128255]) == "⟨128255⟩ "
    of_folder, of_file = tokenizer_of(str(HYBRID)), tokenizer_of(str(HYBRID / "model.safetensors"))
    text = "Once upon a time"
    assert of_folder.encode(text) == of_file.encode(text) != list(text.encode())
    with pytest.raises(UserError, match="no preset"):
        tokenizer_of("tyni")


# --- what may be served ----------------------------------------------------------------------------------------------------


def test_presets_are_prepared() -> None:
    config, tokenizer, _ = prepare(Settings(model="tiny:2", variant="ladder"), 2)
    assert config == model_config("tiny:2", "ladder", 2) and tokenizer.vocab_size == config.vocab_size
    assert Settings(model="tiny:2").random_weights and not Settings(model=str(HYBRID)).random_weights
    for name, message in (("tyni", "no preset"), ("no/such/folder", "missing"), ("tiny:9", "from 1 to 8")):
        with pytest.raises(UserError, match=message):
            prepare(Settings(model=name), 1)


def test_the_upper_bound_is_served_where_the_text_is_noise_anyway() -> None:
    assert prepare(Settings(model="tiny", variant="upper-bound"), 2)[0].variant == "upper-bound"
    with pytest.raises(UserError, match="wrong text"):
        prepare(Settings(model=str(HYBRID), variant="upper-bound"), 2)


@pytest.mark.parametrize(
    ("model", "variant", "said"),
    [
        (str(HYBRID), None, ""),
        (str(HYBRID), "hybrid", ""),  # its own
        (str(HYBRID), "standard", "computing standard, for which the checkpoint was not trained; its text will be wrong\n"),
        ("tiny", "ladder", "tiny is a shape without weights: they are random and its text is noise, for benchmarks only\n"),
    ],
)
def test_text_without_meaning_is_announced(
    model: str, variant: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(model=model, variant=variant)
    warn_of_benchmarks(settings, prepare(settings, 1)[0])
    assert capsys.readouterr().err == (said and f"warning: {said}")


# --- the server ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model", "tiny", *SMALL_CACHE, ranks=1) as started:
        yield started.ready()


def ask(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_it_computes_the_model_that_generate_computes(server: ServerProcess, seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(1024) for _ in range(rng.randint(1, 40))]
    model = load_model("tiny", preset("tiny"), World(0, 1, CPU, Local()), torch.float32)
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = LLM(model, world=World(0, 1, CPU, Local())).generate([prompt], greedy)[0].token_ids
    more = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    (choice,) = ask(server, "/v1/completions", prompt=prompt, **more)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, expected), seed
    detokenizer = IncrementalDetokenizer(ByteTokenizer(1024), prompt_ids=prompt)
    assert choice["text"] == "".join([*map(detokenizer.push, expected), detokenizer.flush()]), seed
    assert choice["finish_reason"] == "length"


def test_text_and_chats_go_through_the_stand_in(server: ServerProcess) -> None:
    (choice,) = ask(server, "/v1/completions", prompt="né", max_tokens=3, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == list("né".encode()) and len(choice["token_ids"]) == 3
    messages = [{"role": "user", "content": "né"}]
    assert ask(server, "/tokenize", messages=messages)["tokens"] == list("user: né\nassistant: ".encode())
    reply = ask(server, "/v1/chat/completions", messages=messages, max_tokens=5, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 5 and reply["choices"][0]["finish_reason"] == "length"
    assert ask(server, "/detokenize", tokens=[*"né ".encode(), 999])["prompt"] == "né ⟨999⟩ "


def test_it_says_that_the_text_is_noise(server: ServerProcess) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["root"] == "tiny (random weights: the text is noise)"
    assert "warning: tiny is a shape without weights: they are random and its text is noise" in server.log
    assert "random weights: the text is noise" in server.log.partition("Serving tiny")[2].partition("Try it")[0]


def test_its_log_tells_the_phases_of_the_start(server: ServerProcess) -> None:
    names = [name for name, _ in startup.stamps(server.log, time.time() - 1000)]
    assert names == ["launcher", "import", "process group", "weights", "engine"]


def test_a_grammar_needs_an_end_that_the_stand_in_lacks(server: ServerProcess) -> None:
    body = {"prompt": "x", "response_format": {"type": "json_object"}}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 400 and "end-of-text" in response.text


# --- startup time ----------------------------------------------------------------------------------------------------------


def test_phases_of_a_log(seed: int) -> None:
    rng = random.Random(seed)
    began = 1.7e9 + rng.random()
    wanted = {"launcher": 2.0, "import": 3.5, "process group": 1.25, "weights": 0.5, "engine": 4.0}
    now, lines = began, ["noise", "2025-01-01T00:00:00.000Z info GET /health"]
    for name, seconds in wanted.items():
        now += seconds
        stamp = datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        if name == "import":
            lines.append(f"{stamp} info start-up: import, {seconds:.3f} s after the process began")
        elif name != "launcher":
            lines.append(f"{stamp} info start-up: {name}")
    found = startup.durations([*startup.stamps("\n".join(lines), began), ("ready", now - began + 0.25)])
    assert found == pytest.approx(wanted | {"ready": 0.25}, abs=2e-3), seed
    unknown = "\n".join(line.replace("3.500 s", "0.000 s") for line in lines)  # /proc did not give the process's age
    assert startup.durations(startup.stamps(unknown, began))["import"] == pytest.approx(5.5, abs=2e-3)


def test_the_age_of_this_process_grows() -> None:
    first = process_age()
    time.sleep(0.05)
    assert 0.03 < process_age() - first < 60 and 0 < first < 24 * 3600


def test_a_cold_start_knows_no_times_of_kernels_and_keeps_its_own_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(*_: object, **environ: str) -> NoReturn:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        raise UserError("started")

    monkeypatch.setattr(startup, "rung_server", start)
    args = Namespace(model="tiny", ranks=1, flags=[], out=tmp_path / "startup.json")
    for caches in (tmp_path / "0", tmp_path / "1"):
        with pytest.raises(UserError, match="started"):
            startup.measure(args, caches)
        path = Table("linear", {}).path
        assert path.is_relative_to(caches) and not path.exists()
        path.write_text("{}")


def test_startup_measures_a_server(tmp_path: Path) -> None:
    out = tmp_path / "startup.json"
    flags = "--model tiny:2 --ranks 2 --runs cold -- --device cpu"
    command = [sys.executable, "-m", "scripts.bench.serving.startup", "--out", str(out), *flags.split(), *SMALL_CACHE]
    began = time.monotonic()
    done = quick_start.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(out.read_text())["runs"]
    assert list(found["phases"])[1:] == ["import", "process group", "weights", "engine", "ready", "first token"]
    assert all(seconds >= 0 for seconds in found["phases"].values())
    assert sum(found["phases"].values()) == pytest.approx(found["first_token"], abs=0.01)
    assert 0 < found["ready"] < found["first_token"] < took
    assert f"| {found['first_token']:.2f} |" in done.stdout


# --- the load generator ------------------------------------------------------------------------------------------------------


def test_a_plan_ends_with_its_seconds(seed: int) -> None:
    long = plan(20.0, 400, (1, 3), (1, 3), 50, seed, random.Random(seed))
    short = plan(20.0, 400, (1, 3), (1, 3), 50, seed, random.Random(seed), seconds=5.0)
    assert short == [r for r in long if r.arrival <= 5.0] and 20 < len(short) < 400, seed


def test_what_runs_too_long_is_cut_off(seed: int) -> None:
    async def chunks(body: dict[str, Any]) -> AsyncIterator[Any]:
        yield [1]
        await asyncio.sleep(600 if body["prompt"] == [1] else 0)
        yield [2]
        yield b"[DONE]"

    requests = [Request(0.01 * i, [prompt], 2) for i, prompt in enumerate([0, 1, 0, 1])]
    began = time.monotonic()
    answers = asyncio.run(FakeServer(chunks).offered(requests, drain=3.0))
    assert [a.outcome for a in answers] == ["complete", "cut off"] * 2 and time.monotonic() - began < 300
    assert [a.tokens for a in answers] == [2, 1, 2, 1]


@pytest.mark.usefixtures("forked_commands")
def test_a_server_that_ends_at_once_is_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny", "--device", "cpu", "--max-num-seqs", "0"]
    with pytest.raises(UserError, match="or ended"), rung_server(1, flags, tmp_path / "log"):
        pass
    assert "0 is not from 1 to 65536" in capfd.readouterr().err


def test_the_load_generator_drives_a_preset(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    model = "--model tiny:2 --device cpu --variant ladder --ranks 2"
    load = "--rates 8 16 --seconds 1.5 --drain 60 --prompt-length 20-60 --new-tokens 8"
    command = [sys.executable, "-m", "scripts.bench.serving.load", *model.split(), *load.split(), "--out", str(out)]
    done = quick_start.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for one in json.loads(out.read_text())["rates"]:
        found = one["summary"]
        assert not found["failed"] and 0 < found["requests"] < 100, one["rate"]
        assert found["end_to_end_ms"]["p99"] >= found["ttft_ms"]["p99"] >= found["ttft_ms"]["p50"] > 0
        assert found["itl_ms"]["p99"] >= found["itl_ms"]["p50"] >= 0  # tokens may be read together


# --- reading weights with threads --------------------------------------------------------------------------------------------


def test_readers_share_the_work(tmp_path: Path, seed: int) -> None:
    config = preset("tiny:3")
    original = load_model("tiny:3", config, World(0, 1, CPU, Local()), torch.float32, seed)
    save_checkpoint(original, tmp_path, torch.float32)
    copies = []
    for readers in (1, 5):
        model = Transformer(config, Local(), CPU, torch.float32).requires_grad_(False)
        fill_all(list(places(model)), open_files(tmp_path), readers)
        copies.append(model)
    for name, expected in original.state_dict().items():
        assert all(torch.equal(copy.state_dict()[name], expected) for copy in copies), (seed, name)


def test_a_reader_that_fails_is_heard(tmp_path: Path, seed: int) -> None:
    config = preset("tiny:2")
    save_checkpoint(load_model("tiny:2", config, World(0, 1, CPU, Local()), torch.float32, seed), tmp_path)

    class Torn(SafetensorsSource):
        def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
            if name.endswith("layers.0.mlp.gate_proj.weight"):
                raise UserError(f"{name} is torn")
            return super().read(name, dim, start, stop)

    model = Transformer(config, Local(), CPU, torch.bfloat16).requires_grad_(False)
    with pytest.raises(UserError, match="is torn"):
        fill_all(list(places(model)), Torn(tmp_path / "model.safetensors"), 3)

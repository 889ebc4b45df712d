"""`examples.json`: the description and example prompts that a checkpoint gives to the page, and that the models answer them."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from checkpoints.presets import model_config
from checkpoints.weights import build_model
from comms import Local
from engine import LLM, SamplingParams
from scripts.corpus.train_tiny import EXAMPLES
from server.examples import MAX_BYTES, read_examples
from server.frontend import banner
from tests.support.command_line import MODELS
from tests.support.server_thread import Site, ready
from text.tokenizer_files import load_tokenizer
from tp import World

RIGHT = dict(zip(EXAMPLES["chat"], ["42", "7, 23, 41, 88", "lamp lamp lamp", "Tom"], strict=False))


@pytest.mark.parametrize("folder", sorted(MODELS.glob("tiny-*")), ids=lambda folder: folder.name)
def test_the_embedded_models_answer_their_examples(folder: Path) -> None:
    assert read_examples(str(folder)) == EXAMPLES
    world = World(0, 1, torch.device("cpu"), Local())
    config, tokenizer = model_config(str(folder), None, 1), load_tokenizer(folder)
    model = build_model(str(folder), config, world, torch.float32)
    assert round(config.parameter_count() / 1e6) == 3
    for question, right in RIGHT.items():
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        (answer,) = LLM(model, tokenizer, world).generate([prompt], SamplingParams(max_tokens=30, temperature=0))
        assert answer.text == right


def test_a_file_that_is_wrong_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = "{}" + " " * MAX_BYTES
    for text in ("{", "[]", '{"chat": "one"}', '{"chat": [1]}', json.dumps({"about": "a" * 501}), "[" * 5000, long):
        (tmp_path / "examples.json").write_text(text)
        assert read_examples(str(tmp_path)) is None
    assert "examples.json has more than 64 KiB" in caplog.text


def test_a_checkpoint_need_not_have_one(tmp_path: Path) -> None:
    assert read_examples(str(tmp_path)) is None
    assert read_examples("llama-3-8b") is None
    (tmp_path / "examples.json").write_text('{"chat": ["Hi"], "more": 1}')
    assert read_examples(str(tmp_path)) == {"about": None, "chat": ["Hi"], "completion": []}


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1"),
        ("0.0.0.0", "http://127.0.0.1"),
        ("::", "http://[::1]"),
        ("2001:db8::1", "http://[2001:db8::1]"),
    ],
)
def test_the_banner_s_address_is_a_url(tmp_path: Path, host: str, address: str) -> None:
    server = Site(tmp_path, host=host).server
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server.servers = [SimpleNamespace(sockets=[listener])]  # type: ignore[list-item]
        assert server._address() == f"{address}:{listener.getsockname()[1]}"


def test_the_banner_s_requests_are_ones_that_the_model_can_answer(tmp_path: Path) -> None:
    service = Site(tmp_path).server.service
    requests = banner(service, ready(), "http://127.0.0.1:1").partition("Try it")[2]
    assert f'"prompt": "{EXAMPLES["completion"][0]}"' in requests and f'"content": "{EXAMPLES["chat"][0]}"' in requests
    service.examples = {"about": None, "chat": [], "completion": []}
    some = banner(service, ready(), "http://127.0.0.1:1").partition("Try it")[2]
    service.examples = None
    assert banner(service, ready(), "http://127.0.0.1:1").partition("Try it")[2] == some
    assert '"prompt": "Once upon a time"' in some and '"content": "Tell me a story about a fox."' in some
    embeds = banner(service, msgspec.structs.replace(ready(), causal=False), "http://127.0.0.1:1").partition("Try it")[2]
    assert embeds.count("curl") == 1 and "/v1/embeddings" in embeds and '"input": "Once upon a time"' in embeds

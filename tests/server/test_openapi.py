"""The real server against its OpenAPI description: no 5xx, only documented statuses, content types and response schemas."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints.export import save_checkpoint
from checkpoints.hf_config import read_config
from checkpoints.weights import random_weights
from comms import Local
from model import Transformer
from tests import MODELS
from tests.support.command_line import environment
from tests.support.server_process import ServerProcess

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method"
)
# A run tests the paths that one of these matches. Those with the largest schemas get the most requests.
PATHS = ("^/v1/completions$", "^/v1/chat/completions$", "^/v1/messages", "^/(?!v1/((chat/)?completions$|messages))")
RUN = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"


@pytest.mark.long
@pytest.mark.timeout(1800)  # half a minute on an idle machine, many minutes on a busy one
def test_the_description_is_true(tmp_path: Path, session_seed: int, in_turn: Callable[..., str]) -> None:
    pytest.importorskip("schemathesis")
    paths = in_turn(PATHS, 0)
    # One layer and a short context limit the run time: a chat may generate until the context is full.
    config = replace(read_config(MODELS / "tiny-hybrid" / "config.json"), n_layers=1, variant="standard", ladder_layers=())
    model = Transformer(config, Local(), torch.device("cpu"), torch.float32)
    random_weights(model, session_seed)
    save_checkpoint(model, tmp_path / "model", torch.float32, tokenizer_from=MODELS / "tiny-hybrid")
    with ServerProcess("--model", tmp_path / "model", "--max-model-len", 16) as server:
        server.ready()
        command = [sys.executable, "-c", RUN, "run", f"{server.url}/openapi.json", "--seed", str(session_seed)]
        command += ["--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--max-examples", "4", "--no-shrink"]
        command += ["--include-path-regex", paths]
        command += ["--request-timeout", "300"]  # a busy machine may need more than the default of 10 s
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=1700)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        metrics = server.metrics()  # some of the requests were valid
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"):
            assert not re.match(paths, path) or metrics[f'rung:http_responses_total{{path="{path}",status="200"}}'] > 0
        assert "(?!" in paths or metrics["rung:generation_tokens_total"] > 0
        assert server.health() == 200
        assert "Traceback" not in server.log

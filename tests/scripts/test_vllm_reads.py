"""What vLLM reads of our checkpoints, with transformers in vLLM's place."""

import json
import sys
from pathlib import Path

import pytest

from errors import UserError
from scripts.lib import results
from scripts.quality import vllm_reads
from tests.support.command_line import MODELS

pytestmark = pytest.mark.usefixtures("forked_commands")
PEER = """
import atexit, os, sys
from types import SimpleNamespace
import torch, transformers
__version__ = "0 (transformers)"

class SamplingParams:
    def __init__(self, prompt_logprobs, max_tokens, **more): ...

class LLM:
    def __init__(self, model, dtype, **more):
        if model.endswith("int8"):
            print("first", file=sys.stderr)
            sys.exit("no int8 here")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        atexit.register(os.abort)  # as vLLM's threads do now and then

    def generate(self, prompts, params, use_tqdm):
        return [SimpleNamespace(prompt_logprobs=self.scored(prompt["prompt_token_ids"])) for prompt in prompts]

    @torch.no_grad()
    def scored(self, ids):
        logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [None] + [{token: SimpleNamespace(logprob=logprobs[i, token].item() + SHIFT)} for i, token in enumerate(ids[1:])]
"""


def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *widths: str, shift: float = 0.0) -> list[dict]:
    """The rows of one run with a peer whose log-probabilities are off by `shift`."""
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "vllm.py").write_text(f"SHIFT = {shift}\n{PEER}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "peer"))
    monkeypatch.setattr(results, "OUT", tmp_path / "out")
    command = ["vllm_reads.py", "--vllm-python", sys.executable, "--model", str(MODELS / "tiny-standard"), "--prompts", "4"]
    monkeypatch.setattr(sys, "argv", [*command, "--dtype", "float32", "--widths", *widths])
    monkeypatch.setattr(vllm_reads, "SAMPLES", 4)
    monkeypatch.setattr(vllm_reads, "LENGTH", 64)
    try:
        vllm_reads.main()
    finally:
        found = json.loads((tmp_path / "out" / "vllm-reads.json").read_text())
        assert found["vllm"] == ("0 (transformers)" if widths != ("int8",) else "unknown")
    return list(found["rows"])


def test_another_program_has_our_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("compressed_tensors")
    plain, fp8, int4 = compare(monkeypatch, tmp_path, vllm_reads.PLAIN, "fp8", "int4")
    assert plain["mean_change"] < 1e-4 and int4["mean_change"] < 1e-4 and 0 < fp8["mean_change"] < 0.01
    assert plain["tokens"] == int4["tokens"] > 100 and int4["perplexity"] != pytest.approx(plain["perplexity"], rel=1e-4)
    assert all(row["vllm_perplexity"] == pytest.approx(row["perplexity"], rel=1e-2) for row in (plain, fp8, int4))
    assert (tmp_path / "out" / "vllm-reads.md").read_text() in capsys.readouterr().out


def test_other_log_probabilities_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not ours: 16 bits"):
        compare(monkeypatch, tmp_path, vllm_reads.PLAIN, shift=0.03)


def test_what_it_cannot_read_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="int8: vLLM ended with exit code 1: no int8 here"):
        compare(monkeypatch, tmp_path, "int8")
    assert "no int8 here" in (tmp_path / "out" / "vllm-reads.md").read_text()


def test_a_python_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be started"):
        vllm_reads.vllm_scores(str(tmp_path / "none"), tmp_path, "float32", [[1, 2]])

"""What transformers reads of our checkpoints, also in vLLM's place."""

import json
import math
import sys
from pathlib import Path

import pytest

from errors import UserError
from scripts.lib import results
from scripts.quality import vllm_reads
from tests.support.command_line import MODELS

pytestmark = pytest.mark.usefixtures("forked_commands")
TOLERANCE = 2e-4  # nats; in 32 bits all but fp8 differ by less than a tenth
PEER = """
import atexit, os, shutil, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
import torch, transformers
from safetensors.torch import load_file, save_file
__version__ = "0 (transformers)"

class SamplingParams:
    def __init__(self, prompt_logprobs, max_tokens, **more): ...

class LLM:
    def __init__(self, model, dtype, **more):
        if model.endswith("int8"):
            print("first", file=sys.stderr)
            sys.exit("no int8 here")
        if model.endswith("w8a16") != (os.environ.get("VLLM_TEST_FORCE_FP8_MARLIN") == "1"):
            sys.exit("no kernel for these weights, or not the one for 8-bit inputs")
        if CHANGE:
            model = shutil.copytree(model, tempfile.mkdtemp(), dirs_exist_ok=True)
            for file in Path(model).glob("model-*.safetensors"):
                tensors = load_file(file)
                exec(CHANGE)
                save_file(tensors, file, {"format": "pt"})
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        atexit.register(os.abort)  # as vLLM's threads do now and then

    def generate(self, prompts, params, use_tqdm):
        return [SimpleNamespace(prompt_logprobs=self.scored(prompt["prompt_token_ids"])) for prompt in prompts]

    @torch.no_grad()
    def scored(self, ids):
        logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [None] + [{token: SimpleNamespace(logprob=logprobs[i, token].item() + SHIFT)} for i, token in enumerate(ids[1:])]
"""


def compare(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *widths: str, peer: str = "vllm", shift: float = 0.0, change: str = ""
) -> list[dict]:
    """The rows of one run. peer: `transformers`, or `vllm`: one whose log-probabilities are off by `shift`, and who reads the files'
    `tensors` after the statement `change`."""
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "vllm.py").write_text(f"SHIFT = {shift}\nCHANGE = {change!r}\n{PEER}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "peer"))
    monkeypatch.setattr(results, "OUT", tmp_path / "out")
    command = ["vllm_reads.py", *["--vllm-python", sys.executable] * (peer == "vllm")]
    command += ["--model", str(MODELS / "tiny-standard"), "--prompts", "4", "--tolerance", str(TOLERANCE)]
    monkeypatch.setattr(sys, "argv", [*command, "--dtype", "float32", "--widths", *widths])
    monkeypatch.setattr(vllm_reads, "SAMPLES", 4)
    monkeypatch.setattr(vllm_reads, "LENGTH", 64)
    try:
        vllm_reads.main()
    finally:
        found = json.loads((tmp_path / "out" / f"{peer}-reads.json").read_text())
        assert peer == "transformers" or found["reader"] == ("vLLM 0 (transformers)" if widths != ("int8",) else "unknown")
    return list(found["rows"])


def test_another_program_has_our_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("compressed_tensors")
    plain, fp8, w8a16, int4 = compare(monkeypatch, tmp_path, vllm_reads.PLAIN, "fp8", "int4", peer="transformers")
    assert [row["width"] for row in (plain, fp8, w8a16)] == [vllm_reads.PLAIN, "fp8", vllm_reads.W8A16]
    assert all(row["mean_change"] < 1e-5 and "rounding" not in row for row in (plain, w8a16, int4))
    assert TOLERANCE < fp8["mean_change"] < 0.01 and TOLERANCE < fp8["rounding"] < 0.01
    assert plain["tokens"] == int4["tokens"] > 100 and int4["perplexity"] != pytest.approx(plain["perplexity"], rel=1e-4)
    assert all(row["their_perplexity"] == pytest.approx(row["perplexity"], rel=1e-2) for row in (plain, fp8, w8a16, int4))
    assert (tmp_path / "out" / "transformers-reads.md").read_text() in capsys.readouterr().out


def test_other_log_probabilities_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not ours: 16 bits"):
        compare(monkeypatch, tmp_path, vllm_reads.PLAIN, shift=0.03)


@pytest.mark.parametrize(
    "change",
    [
        "tensors.update((name, scales * 1.02) for name, scales in tensors.items() if name.endswith('weight_scale'))",
        "tensors.update((name, scales.flip(0)) for name, scales in tensors.items() if name.endswith('1.self_attn.o_proj.weight_scale'))",
    ],
    ids=["2 percent", "one layer permuted"],
)
def test_wrong_scales_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str) -> None:
    pytest.importorskip("compressed_tensors")
    with pytest.raises(UserError, match=r"not ours: .*fp8-w8a16"):
        compare(monkeypatch, tmp_path, "fp8", change=change)


def test_a_program_that_does_not_round_inputs_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    change = "from scripts.quality.vllm_reads import keep_inputs; keep_inputs(Path(model))"
    with pytest.raises(UserError, match=r"not ours: fp8$"):
        compare(monkeypatch, tmp_path, "fp8", change=change)


def test_rounding_of_inputs_allows_little_more_than_itself() -> None:
    assert vllm_reads.limit({}, 0.02) == vllm_reads.limit({"rounding": 0.01}, 0.02) == 0.02
    assert vllm_reads.limit({"rounding": 0.03}, 0.02) == pytest.approx(math.hypot(0.03, 0.03))


def test_what_it_cannot_read_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="int8: vLLM ended with exit code 1: no int8 here"):
        compare(monkeypatch, tmp_path, "int8")
    assert "no int8 here" in (tmp_path / "out" / "vllm-reads.md").read_text()


def test_a_python_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be started"):
        vllm_reads.their_scores(str(tmp_path / "none"), tmp_path, "float32", [[1, 2]], {})

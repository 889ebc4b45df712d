"""The table of what quantized weights cost: paired standard errors, and a command that goes on where it was stopped."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.lib.rows import CODE
from scripts.quality import weights
from scripts.quality.heldout import SEED
from tests import ROOT
from tests.support.command_line import MODELS


def evaluation(stories: int, items: int, loss: float) -> dict[str, Any]:
    """Stories of very different lengths and likelihoods, from each of which about `loss` nats a token are lost, not evenly."""
    draws, noise = random.Random(SEED), random.Random()
    lengths = [draws.randrange(20, 300) for _ in range(stories)]
    means = [draws.uniform(0.1, 0.6) + loss + loss * noise.gauss(0, 1) for _ in lengths]
    texts = [[-mean + 0.1 * loss * noise.gauss(0, 1) for _ in range(n)] for mean, n in zip(means, lengths, strict=True)]
    return {"stories": texts, "answers": {task: [noise.random() < 0.9 for _ in range(items)] for task in weights.TASKS}}


def test_errors_are_those_of_paired_differences(seed: int) -> None:
    before, after = evaluation(400, 50, 0.0), evaluation(400, 50, 0.01)
    both = list(zip(before["stories"], after["stories"], strict=True))
    for measure, of_token in (weights.change, lambda d: d), (weights.divergence, lambda d: d * d / 2):
        pairs = [(sum(of_token(a - b) for a, b in zip(*pair, strict=True)), len(pair[0])) for pair in both]
        lost, tokens = sum(d for d, _ in pairs), sum(n for _, n in pairs)
        without = [(lost - d) / (tokens - n) for d, n in pairs]  # the jackknife
        middle = sum(without) / len(without)
        error = (sum((x - middle) ** 2 for x in without) * (len(pairs) - 1) / len(pairs)) ** 0.5
        assert measure(before, after) == pytest.approx((lost / tokens, error), rel=0.02)
        assert measure(before, before) == (0.0, 0.0)


def test_the_divergence_is_that_of_kullback_and_leibler(seed: int) -> None:
    """Of a random distribution and one with small errors in its logits, over tokens that are drawn from it."""
    logits = torch.randn(7)
    p, q = logits.log_softmax(0), (logits + 0.03 * torch.randn(7)).log_softmax(0)
    tokens = torch.multinomial(p.exp(), 200_000, replacement=True)
    found, error = weights.divergence(*({"stories": one[tokens].view(200, -1).tolist()} for one in (p, q)))
    expected = (p.exp() * (p - q)).sum().item()
    assert found == pytest.approx(expected, abs=5 * error + 0.2 * expected)


def test_exact_match_is_that_of_all_tasks(seed: int) -> None:
    after = evaluation(1, 50, 0.0)
    share, spread = weights.exact_match(after)
    right = [one for task in after["answers"].values() for one in task]
    assert share == pytest.approx(sum(right) / len(right))
    assert spread == pytest.approx((share * (1 - share) / len(right)) ** 0.5, rel=0.2)  # the tasks' shares differ little


def test_a_stopped_command_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> None:
    asked: list[str] = []

    def evaluate(path: Path, width: str, stories: int, items: int) -> dict[str, Any]:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(width)
        return evaluation(stories, items, 0.0 if width == weights.PLAIN else 0.01)

    monkeypatch.setattr(weights, "evaluate", evaluate)
    monkeypatch.setattr(weights, "OUT", tmp_path)
    monkeypatch.setattr(weights, "results_folder", lambda args: tmp_path)
    flags = ["--models", str(MODELS / "tiny-hybrid"), "--widths", "int4", "fp8", "int4-gptq", "--stories", "30", "--items", "5"]
    monkeypatch.setattr(sys, "argv", ["weights.py", *flags])
    with pytest.raises(KeyboardInterrupt):
        weights.main()
    assert asked == [weights.PLAIN, "int4", "fp8"]
    asked.clear()
    weights.main()
    assert asked == ["int4-gptq"]
    rows = json.loads((tmp_path / "accuracy-weights.json").read_text())["rows"]
    assert [row["width"] for row in rows] == [weights.PLAIN, "int4", "fp8", "int4-gptq"]
    table = (tmp_path / "accuracy-weights.md").read_text().splitlines()
    assert table[0] == "| model | 16 bits | int4 | fp8 | int4-gptq | int4-gptq against int4 |"
    expected = rows[3]["change_from_int4"] * 100, rows[3]["change_from_int4_error"] * 100
    assert table[2].endswith(" {:+.3f} ± {:.3f} |".format(*expected))
    asked.clear()
    monkeypatch.setattr(weights, "code_digest", lambda: "other")
    with pytest.raises(KeyboardInterrupt):
        weights.main()
    assert asked == [weights.PLAIN, "int4", "fp8"]


def test_rows_know_all_code_that_decides_about_quality() -> None:
    """All modules of this repository that the commands import, but those that only keep and show what is found."""
    names = ("accuracy", "seeds", "weights")
    imports = "; ".join(f"import scripts.quality.{name}" for name in names)
    files = "print(*(m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {imports}; {files}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ours = {Path(line).relative_to(ROOT) for line in done.stdout.splitlines() if Path(line).is_relative_to(ROOT)}
    needed = {str(path) for path in ours if path.parts[0] not in (".venv", "tests") and path.name != "__init__.py"}
    needed -= {name for name in needed if name.startswith(("scripts/lib/", "scripts/sweep/"))}
    assert "quantized/gptq.py" in needed
    assert needed <= {str(path.relative_to(ROOT)) for pattern in CODE for path in ROOT.glob(pattern)}

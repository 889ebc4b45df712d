"""`make compare`: its commands are valid, and its table has the medians of the raw files and their ratios to vLLM's."""

import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from scripts import compare as command
from scripts.bench.serving import load
from scripts.lib.steps import Step
from scripts.report.compare import compare
from scripts.sweep import __main__ as sweep
from scripts.sweep.rows import Row, Setting, row_line

MACHINE = {"cpu": "a CPU", "cores": 4, "gpus": "2 x a GPU", "torch": "2.11"}


def arguments(monkeypatch: pytest.MonkeyPatch, *argv: object) -> Any:
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, argv)])
    return command.parse_args()


@pytest.mark.parametrize(("ranks", "widths"), [(1, ()), (2, ()), (1, ("--quantize", "fp8", "--kv-dtype", "fp8"))])
def test_every_command_is_one_that_its_script_takes(
    ranks: int, widths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = "--ranks", ranks, "--raw", tmp_path, "--models", "llama-3-8b", "llama-3-70b:16", "--vllm-python", sys.executable
    found = list(command.steps(arguments(monkeypatch, *flags, *widths)))
    assert len({step.name for step in found}) == len(found) == 2 * (4 if ranks == 1 else 6)
    files = [step.command[step.command.index("--out") + 1] for step in found if "bench.serving.load" in step.command[2]]
    assert len(set(files)) == len(files), "loads must not overwrite each other"
    for step in found:
        module = step.command[2]
        monkeypatch.setattr(sys, "argv", [module, *step.command[3:]])
        args = {"scripts.sweep": sweep, "scripts.bench.serving.load": load}[module].parse_args()
        assert (args.quantize, args.kv_dtype) == (("fp8", "fp8") if widths else (None, "auto"))
        assert bool(widths) == (", fp8, fp8 cache " in step.name), "another width is another step of the same folder"


def row(variant: str, batch: int, decode: list[float], prefill: list[float], new: int = 64, **more: Any) -> Row:
    setting = Setting("llama-3-8b", variant, 2, batch, 1024, new, device="cuda", **more)
    samples = [
        {"decode_ms_per_token": d, "prefill_ms": p, "step_ms": [d] * (new - 1)} for d, p in zip(decode, prefill, strict=True)
    ]
    return Row(setting, MACHINE, {}, samples=samples)


def loaded(folder: Path, server: str, variant: str | None, ttft: float, itl: float, offline: float | None, **more: Any) -> None:
    settings = {"model": "llama-3-8b", "ranks": 2, "server": server, "variant": variant, **more}
    settings |= {"prompt_length": [1024, 1024], "new_tokens": [256, 256]}
    spread = {name: {"p50": value, "p90": 9e9, "p99": 9e9} for name, value in (("ttft_ms", ttft), ("itl_ms", itl))}
    idle = 0.0123 if server == "Rung" else None
    result = {"settings": settings, "machine": MACHINE, "rates": [{"rate": 4.0, "summary": spread, "gpu_idle_share": idle}]}
    result["offline"] = None if offline is None else {"requests": 32, "generated_tokens_per_second": offline}
    (folder / f"load-{server}-{variant}-{len(more)}.json").write_text(json.dumps(result))


def test_the_table_has_medians_and_ratios(tmp_path: Path, seed: int) -> None:
    times = {
        (v, b): [[random.uniform(2, 900) for _ in range(3)] for _ in range(2)] for v in ("vllm", "standard") for b in (1, 8)
    }
    rows = [row(variant, batch, *both) for (variant, batch), both in times.items()]
    rows += [row("ladder", 8, [1.0], [2.0]), row("standard", 64, [1.0], [2.0]), row("standard", 1, [7e4], [7e4], comm="nccl")]
    rows += [row("vllm", 32, [10.0], [80.0], new=256), row("ladder", 32, [8.0], [60.0], new=256)]  # all requests at once
    (tmp_path / "sweep.jsonl").write_text("".join(map(row_line, rows)))
    loaded(tmp_path, "vLLM", None, 40.0, 5.0, None)
    loaded(tmp_path, "Rung", None, 50.0, 4.0, 3000.0)
    loaded(tmp_path, "Rung", "ladder", 50.0, 4.0, 1.0)
    loaded(tmp_path, "Rung", None, 1.0, 1.0, None, quantize="fp8", kv_dtype="auto")  # vLLM was not measured so

    table = compare(tmp_path)
    assert table is not None
    head, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    assert head == ["model", "ranks", "tokens", "what", "vLLM", "standard", "times as fast", "ladder", "times as fast"]
    found = {cells[3]: cells for cells in lines}
    for batch in (1, 8):
        for what, index in (f"decode, ms a step of {batch}", 0), (f"prefill, ms of {batch}", 1):
            ours, peer = (statistics.median(times[name, batch][index]) for name in ("standard", "vllm"))
            assert found[what][:3] == ["llama-3-8b", "2", "1024 + 64"]
            assert float(found[what][5]) == pytest.approx(ours, abs=0.51 if ours >= 100 else 0.006)
            assert float(found[what][6]) == pytest.approx(peer / ours, abs=0.006)
    assert found["decode, ms a step of 1"][7:] == ["–", "–"]
    assert float(found["decode, ms a step of 8"][8]) == pytest.approx(statistics.median(times["vllm", 8][0]), abs=0.006)
    seconds = (80 + 255 * 10) / 1e3
    at_once = found["32 requests at once, tokens/s"]
    assert float(at_once[6]) == pytest.approx(3000 / (32 * 256 / seconds), abs=0.006)
    assert float(at_once[8]) == pytest.approx(seconds / ((60 + 255 * 8) / 1e3), abs=0.006), "by LLM, if it was measured so"
    assert found["time to first token at 4 requests/s, ms (p50)"][4:7] == ["40.00", "50.00", "0.80"]
    assert found["time between tokens at 4 requests/s, ms (p50)"][4:7] == ["5.00", "4.00", "1.25"]
    assert found["GPU's wait for the host at 4 requests/s, % of a step"][4:7] == ["", "1.23", "–"]
    assert not any("fp8" in cells[0] for cells in lines), "vLLM was not measured so"
    assert "decode, ms a step of 64" not in found, "vLLM was not measured there"
    assert "2 x a GPU, torch 2.11" in table


def test_a_failed_step_leaves_the_table_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "".join(row_line(row(name, 1, [ms], [ms])) for name, ms in (("vllm", 6.0), ("standard", 4.0)))
    write = f"import pathlib; pathlib.Path({str(tmp_path / 'sweep.jsonl')!r}).write_text({line!r})"
    found = [Step("write", 1, (sys.executable, "-c", write)), Step("fail", 1, (sys.executable, "-c", "raise SystemExit(3)"))]
    monkeypatch.setattr(command, "steps", lambda _: found)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--ranks", "2", "--raw", str(tmp_path)])
    with pytest.raises(UserError, match="did not end well"):
        command.main()
    said = capsys.readouterr()
    assert said.out == (tmp_path / "compare.md").read_text() + "\n"
    assert "| 6.00 | 4.00 | 1.50 |" in said.out and "fail: exit code 3" in said.err

"""`python -m training.plan` and `python -m training.profile_collectives`, as a user runs them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints.presets import preset
from comms.cluster import load_cluster
from errors import UserError
from ranks.processes import on_ranks
from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import Finished, Here, environment
from training import plan
from training.planner.collectives import synthesize, write_profile
from training.planner.cost import forward_flops
from training.planner.report import draw
from training.sharding import Mesh, Sharding

PAPER = ("--model", "llama-7b", "--gpus", "1024", "--cluster", "a800")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    monkeypatch.chdir(ROOT)
    return Here(monkeypatch, capfd, plan.main, ())


def test_the_choice_and_the_alternatives_as_text(command: Here) -> None:
    done = command(*PAPER, "--no-overlap", "updates")
    assert done.code == 0 and not done.err
    assert "plan     P 1x1, G 1x1, OS 8x1" in done.out
    for name in ("chosen", "data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "MiCS", "ZeRO++"):
        assert f"| {name} |" in done.out
    assert "MFU" in done.out and "does not fit" in done.out


def test_the_same_as_json(command: Here) -> None:
    record = command(*PAPER, "--json").record
    chosen = record["chosen"]
    assert (chosen["parameters"], chosen["gradients"], chosen["optimizer"]) == ("1x1", "1x1", "8x1")
    assert record["ranked"][0] == chosen and record["micro_batches"] == 1
    assert set(record["alternatives"]) == {"data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "MiCS", "ZeRO++"}
    flops = 3 * forward_flops(preset("llama-7b"), 4096, 1)
    assert chosen["mfu"] == pytest.approx(flops / chosen["step_seconds"] / 312e12)
    assert chosen["tokens_per_gpu_second"] == pytest.approx(4096 / chosen["step_seconds"])
    parts = {name: value for name, value in chosen["memory_bytes"].items() if name != "total"}
    assert sum(parts.values()) == pytest.approx(chosen["memory_bytes"]["total"]) and parts["reserve"] == 2e9
    assert record["cluster"]["sources"]["node_gb_per_second"]


def test_flags_reach_the_model(command: Here) -> None:
    """Each flag alone changes the figure that it concerns, in the right direction."""

    def chosen(*more: object) -> dict[str, Any]:
        result: dict[str, Any] = command(*PAPER, "--sharding", "2,2,8", "--json", *more).record["chosen"]
        return result

    plain = chosen()
    assert chosen("--recompute")["memory_bytes"]["activations"] < plain["memory_bytes"]["activations"]
    assert chosen("--recompute")["compute_seconds"] == pytest.approx(plain["compute_seconds"] * 4 / 3)
    assert chosen("--global-batch", "8M")["compute_seconds"] == pytest.approx(2 * plain["compute_seconds"])
    doubled = chosen("--micro-batch", "2", "--global-batch", "8M")["memory_bytes"]["activations"]
    assert 1.9 < doubled / plain["memory_bytes"]["activations"] < 2  # all doubles except the loss, which is computed in chunks
    assert chosen("--reserve", "5")["memory_bytes"]["reserve"] == 5e9
    assert chosen("--precision", "float32", "--gpu-memory", "200")["memory_bytes"]["parameters"] == pytest.approx(
        2 * plain["memory_bytes"]["parameters"]
    )
    assert chosen("--bucket-mb", "1")["communication_seconds"]["all_reduce"] > plain["communication_seconds"]["all_reduce"]
    assert chosen("--intra-tensor")["communication_seconds"]["updates"] < plain["communication_seconds"]["updates"]
    exposed = chosen("--no-overlap", "parameters", "gradients", "updates")
    assert exposed["exposed_seconds"]["total"] == pytest.approx(exposed["communication_seconds"]["total"])
    assert plain["exposed_seconds"]["total"] < plain["communication_seconds"]["total"]


def test_a_checkpoint_directory_and_a_profile(command: Here, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, synthesize(load_cluster("a800"), 2), {})
    flags = "--model models/tiny-hybrid --gpus 4 --gpus-per-node 2 --sequence-length 128 --global-batch 4k"
    refused = command.refuses(*flags.split(), "--profile", profile)
    assert "nodes of 8 GPUs" in refused and "--gpus-per-node 8" in refused
    fitting = ("--model", "models/tiny-hybrid", "--gpus", "16", "--sequence-length", "128", "--global-batch", "16k")
    record = command(*fitting, "--profile", profile, "--json").record
    assert record["profile"] == "profile.json" and record["gpus"] == 16
    assert "profile-collectives" in command.refuses(*fitting[:3], "64", *fitting[4:], "--profile", profile)


def test_nodes_are_put_in_order(command: Here, tmp_path: Path) -> None:
    leaves = tmp_path / "leaves.txt"
    leaves.write_text("".join(f"node{i} leaf{i % 2}\n" for i in range(8)))
    args = ("--model", "llama-7b", "--gpus", "64", "--cluster", "a800", "--sharding", "1,1,8x4", "--leaves", leaves)
    order = command(*args, "--json").record["node_order"]
    halves = [{int(name[4:]) % 2 for name in order[half : half + 4]} for half in (0, 4)]
    assert [len(half) for half in halves] == [1, 1] and len(set(order)) == 8
    text = command(*args).out
    assert "node0" in text and "span 2 leaf switches in all, 4 in the order of the file" in text
    leaves.write_text("node0 leaf0\n")
    assert "the plan needs 8" in command.refuses(*args)


def test_the_plot(command: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one node to 4,096 GPUs, or as far as a measured profile reaches. On more GPUs fewer micro-batches hide less."""
    path, profile, drawn = tmp_path / "mfu.png", tmp_path / "profile.json", list[dict[str, list[tuple[int, float]]]]()
    write_profile(profile, synthesize(load_cluster("a800"), 4), {})
    monkeypatch.setattr(plan, "draw", lambda lines, *more: drawn.append(lines) or draw(lines, *more))
    words = "--model", "llama-7b", "--gpus", "32", "--cluster", "a800", "--no-overlap", "updates", "--plot", path
    assert command(*words, "--profile", profile).code == 0
    path.unlink()
    done = command(*words)
    assert done.code == 0 and path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
    assert [[gpus for gpus, _ in one["chosen"]] for one in drawn] == [[8, 16, 32], [8 * 2**i for i in range(10)]]
    assert {"ZeRO-1", "ZeRO-3", "MiCS", "ZeRO++"} <= set(drawn[1])
    assert all(0 < mfu < 1 for points in drawn[1].values() for _, mfu in points)
    assert drawn[1]["chosen"][7][1] < drawn[1]["chosen"][0][1]
    with pytest.raises(UserError, match="leave --plot out"):
        draw({}, "", path)
    assert "in a folder that exists" in _last(command("--model", "tiny", "--gpus", "8", "--plot", tmp_path / "no" / "mfu.png"))
    assert ".png, .svg or .pdf" in command.refuses("--model", "tiny", "--gpus", "8", "--plot", "mfu")


def _last(done: Finished) -> str:
    assert done.code == 2
    return done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "mends"),
    [
        ((*PAPER[:3], "1023", *PAPER[4:]), ("no multiple of the 8 GPUs", "1024", "--gpus-per-node")),
        ((*PAPER[:1], "llama-8t", *PAPER[2:]), ("no preset 'llama-8t'", "llama-7b")),
        ((*PAPER[:1], "./no/such", *PAPER[2:]), ("config.json is missing",)),
        ((*PAPER, "--sharding", "1,1,1"), ("needs 1", "of 80.0 a GPU", "--sharding 1x1,1x1,8x1 does")),
        ((*PAPER, "--sharding", "2,1,8"), ("P must lie inside G",)),
        ((*PAPER, "--sharding", "1,8"), ("is not a sharding", "1,1,8x1")),
        ((*PAPER, "--sharding", "1,1,8x3"), ("does not divide that of the cluster",)),
        ((*PAPER, "--gpu-memory", "10"), ("no plan fits", "--recompute")),
        ((*PAPER, "--gpu-memory", "-1"), ("no number of at least 0",)),
        ((*PAPER, "--global-batch", "5M"), ("cannot be shared", "such as 4194304")),
        ((*PAPER, "--global-batch", "4T"), ("4M (4 * 2**20)",)),
        ((*PAPER, "--gpus", "0"), ("whole number of at least 1",)),
        ((*PAPER[:4], "--cluster", "b300"), ("no cluster 'b300'", "a800, h100, h200")),
        ((*PAPER, "--profile", "pyproject.toml"), ("cannot be read as JSON", "make profile-collectives")),
        ((*PAPER, "--leaves", "no-such-file"), ("NODE LEAF",)),
        ((*PAPER, "--bucket-mb", "0"), ("--bucket-mb: '0' is no number above 0",)),
        (("--model", "llama-7b"), ("--gpus", "--help")),
    ],
)
def test_bad_input_is_one_line_with_its_mend(command: Here, args: tuple[str, ...], mends: tuple[str, ...]) -> None:
    line = command.refuses(*args)
    for mend in mends:
        assert mend in line


# --- profiling, on separate ranks --------------------------------------------------------------------------------------------


def profile(*args: object, ranks: int = 0) -> Finished:
    command = [*(on_ranks(ranks) if ranks else [sys.executable]), "-m", "training.profile_collectives", *map(str, args)]
    done = quick_start.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    return Finished(done.returncode, done.stdout, done.stderr)


def test_a_measured_profile_plans_for_the_ranks_it_was_made_on(command: Here, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    sizes = ("--smallest", "4k", "--largest", "64k", "--repeats", "2")
    done = profile("--device", "cpu", "--gpus-per-node", 1, *sizes, "--out", path, ranks=2)
    assert done.code == 0, done.err
    content = json.loads(path.read_text())
    assert (content["backend"], content["ranks"], content["gpus_per_node"]) == ("gloo", 2, 1)
    assert len(content["points"]) == 4 * 3  # 4 operations, 3 sizes, and one mesh, the only one of two nodes
    args = ("--model", "tiny", "--gpus", "2", "--gpus-per-node", "1", "--sequence-length", "64", "--global-batch", "1k")
    record = command(*args, "--profile", path, "--json").record
    meshes = [record["chosen"][state] for state in ("parameters", "gradients", "optimizer")]
    Sharding(*map(Mesh.parse, meshes)).check(Mesh(1, 2))


def test_profiling_needs_ranks_and_a_place_to_write(tmp_path: Path) -> None:
    alone = profile("--out", tmp_path / "profile.json")
    assert alone.code == 2 and "launch.py --ranks 2" in alone.err
    nowhere = profile("--out", tmp_path / "no" / "profile.json")
    assert nowhere.code == 2 and "there is no folder" in nowhere.err


def test_a_choice_that_is_not_the_shortest_says_why(command: Here) -> None:
    """The message says how much longer the step is and which tolerance allows it. --tolerance 0 chooses the shortest step."""
    flags = "--model ladder-1b --gpus 8 --cluster h200 --sequence-length 2048 --micro-batch 4 --global-batch 1M"
    asked = flags.split()
    shown = json.loads(command(*asked, "--json").out)
    longer = shown["chosen"]["step_seconds"] / shown["ranked"][1]["step_seconds"] - 1
    assert 0 < longer <= 0.01
    assert (
        f"the step of the chosen plan is {longer:.2%} longer than that of the next plan; this counts as equal (--tolerance 0.01)"
        in command(*asked).out
    )
    assert "counts as equal" not in command(*asked, "--tolerance", "0").out

"""Errors over seeds and prompts, and the paired t test; a command that goes on where it was stopped."""

import json
import math
import os
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from errors import UserError
from scripts.corpus.documents import documents
from scripts.lib.rows import locked
from scripts.lib.statistics import holm, mean_error, paired_test, ratio_error, t_tails
from scripts.lib.workers import Workers, time_left
from scripts.quality import seeds
from scripts.quality.heldout import SEED
from tests import MODELS
from training.metrics import seconds_of
from training.token_file import write_tokens


def test_tails_of_students_t(seed: int) -> None:
    t = random.uniform(0.1, 8)
    assert t_tails(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-9)  # the distributions' closed forms
    assert t_tails(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-9)
    assert t_tails(2.570582, 5) == pytest.approx(0.05, abs=1e-6)  # the table of quantiles
    assert t_tails(2.008559, 50) == pytest.approx(0.05, abs=1e-6)


def test_the_paired_test_is_that_of_the_differences(seed: int) -> None:
    values = [random.gauss(0.3, 1) for _ in range(4)]
    mean, error, p = paired_test(values)
    assert (mean, error) == pytest.approx((statistics.mean(values), statistics.stdev(values) / 2))
    assert p == t_tails(mean / error, 3)
    assert paired_test([0.0, 0.0]) == (0.0, 0.0, 1.0)
    assert math.isnan(mean_error([1.0])[1]) and math.isnan(paired_test([1.0])[2])


def test_p_is_uniform_if_nothing_differs(seed: int) -> None:
    draws = [paired_test([random.gauss(0, 1) for _ in range(3)])[2] for _ in range(800)]
    assert sum(p < 0.1 for p in draws) == pytest.approx(80, abs=6 * 8.5)  # 6 binomial errors


def test_holm_multiplies_the_smallest_p_most(seed: int) -> None:
    known = {0.001: 0.006, 0.01: 0.05, 0.012: 0.05, 0.03: 0.09, 0.2: 0.4, 0.3: 0.4}  # worked by hand
    ps = random.sample(list(known), len(known))
    assert holm(ps) == pytest.approx([known[p] for p in ps])
    assert holm([0.6, math.nan, 0.7]) == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert holm([0.1, math.nan, 0.3]) == pytest.approx([0.2, math.nan, 0.3], nan_ok=True)
    assert holm([]) == []


def row(variant: str, number: int, rate: float, items: int = 200) -> dict[str, Any]:
    return {
        "variant": variant,
        "seed": number,
        "stories": [(-random.uniform(1, 90), 20 + 3 * i) for i in range(50)],  # the same ones for all models
        "answers": {task: [int(random.random() < rate) for _ in range(items)] for task in seeds.TASKS},
    }


def test_summary(seed: int) -> None:
    rows = [row(variant, number, rate) for variant, rate in (("standard", 0.9), ("ladder", 0.7)) for number in (1, 2, 3)]
    base, ladder = seeds.summary(rows)
    flat = [[one for task in seeds.TASKS for one in each["answers"][task]] for each in rows]
    shares = [sum(one) / len(one) for one in flat]
    assert base["mean"][:2] == pytest.approx((statistics.mean(shares[:3]), statistics.stdev(shares[:3]) / math.sqrt(3)))
    of_prompts = [sum(one) / 3 for one in zip(*flat[:3], strict=True)]
    assert base["mean"][2] == pytest.approx(mean_error(of_prompts)[1], rel=0.1)
    assert shares[base["median_seed"] - 1] == statistics.median(shares[:3])
    assert ladder["match_difference"] == pytest.approx(
        paired_test([b - a for a, b in zip(shares[:3], shares[3:], strict=True)])
    )
    of_prompts = [sum(one[3:]) / 3 - sum(one[:3]) / 3 for one in zip(*flat, strict=True)]
    assert ladder["match_difference_prompts_error"] == pytest.approx(mean_error(of_prompts)[1], rel=0.1)
    assert base["perplexity"][0] == pytest.approx(statistics.mean(math.exp(seeds.nats(one)) for one in rows[:3]))


def test_the_errors_of_perplexity_are_over_stories(seed: int) -> None:
    rows = [row(variant, number, 0.9) for variant in ("standard", "ladder") for number in (1, 2)]
    base, ladder = seeds.summary(rows)
    told = np.array([[s for s, _ in one["stories"]] for one in rows])
    sizes = np.array([n for _, n in rows[0]["stories"]])
    drawn = np.random.default_rng(seed).integers(50, size=(4000, 50))
    losses = -told[:, drawn].sum(axis=2) / sizes[drawn].sum(axis=1)  # of a bootstrap: (models, draws)
    assert base["perplexity"][2] == pytest.approx(base["perplexity"][0] * losses[:2].mean(axis=0).std(), rel=0.15)
    assert ladder["nats_difference_stories_error"] == pytest.approx((losses[2:] - losses[:2]).mean(axis=0).std(), rel=0.15)


def test_the_table_says_percent_freedom_and_adjusted_p(seed: int) -> None:
    variants = ("standard", "ladder", "parallel")
    rows = [row(variant, number, 0.9) for variant in variants for number in (1, 2, 3)]
    for one in rows:
        if one["variant"] == "ladder":
            one["stories"] = [(1.5 * s, n) for s, n in one["stories"]]
        one |= {"dtype": "float32", "machine": seeds.machine(), "training": {"tokens_in_corpus": 0, "codes": []}}
    entries = seeds.summary(rows)
    ps = [entry["nats_difference"][2] for entry in entries[1:]]
    assert [entry["nats_holm_p"] for entry in entries[1:]] == holm(ps)
    text = seeds.table(entries, rows)
    loss = next(entry for entry in entries if entry["variant"] == "ladder")["nats_difference"][0]
    assert f"| {100 * (math.exp(loss) - 1):+.2f} ±" in text and "(2 degrees of freedom), adjusted by Holm" in text
    alone = [one for one in rows if one["seed"] == 1]
    assert "freedom" not in seeds.table(seeds.summary(alone), alone)


def test_seeds_that_answer_alike_have_the_error_of_one(seed: int) -> None:
    """Three models that fail at the same prompts say no more about prompts than one does."""
    one = row("ladder", 1, 0.8)
    alike = seeds.summary([one | {"seed": number} for number in (1, 2, 3)])[0]
    p = seeds.share(one, "question")
    assert alike["question"][2] == pytest.approx(math.sqrt(p * (1 - p) / 199))  # of 200 prompts, none of which repeats


def test_prompts_that_repeat_are_one_cluster(seed: int) -> None:
    """The error is that of a bootstrap over the distinct prompts, which a model answers alike."""
    keys = [one.key for one in documents(SEED, 400, split="heldout", kind="arithmetic")]
    right = {key: int(random.random() < 0.8) for key in set(keys)}
    answers = [right[key] for key in keys]
    groups = [(right[key] * count, count) for key, count in Counter(keys).items()]
    drawn = np.array(groups)[np.random.default_rng(seed).integers(len(groups), size=(4000, len(groups)))].sum(axis=1)
    error = seeds.prompts_error([{"arithmetic": answers}, {"arithmetic": answers}], "arithmetic")
    assert error == pytest.approx((drawn[:, 0] / drawn[:, 1]).std(), rel=0.15)
    assert error > 1.2 * mean_error(answers)[1]
    other = [{"arithmetic": [1 - one for one in answers]}]
    assert seeds.prompts_error(other, "arithmetic") == pytest.approx(error)


def test_the_error_of_a_ratio_of_clusters(seed: int) -> None:
    sums, sizes = np.random.default_rng(seed).uniform(1, 9, (2, 60))
    ratio, error = ratio_error(list(sums), list(sizes))
    # least squares on a constant, weighted by size, with errors of clusters
    weights = sizes / sizes.sum()
    means = sums / sizes
    expected = math.sqrt(60 / 59 * float((weights**2 * (means - np.average(means, weights=sizes)) ** 2).sum()))
    assert (ratio, error) == pytest.approx((np.average(means, weights=sizes), expected))
    assert ratio_error(list(sums), [1] * 60) == pytest.approx(mean_error(list(sums)))
    assert math.isnan(ratio_error([1.0], [2.0])[1])


def test_the_time_left_is_that_of_the_last_worker(seed: int) -> None:
    assert time_left([5.0, 1.0], [3.0, 4.0], 2) == 8.0  # one worker: 1 + 3 + 4, the other: 5
    assert time_left([], [2.0, 2.0, 2.0], 2) == 4.0
    assert time_left([7.0], [], 4) == 7.0
    jobs = [random.uniform(1, 9) for _ in range(20)]
    assert time_left([], jobs, 1) == pytest.approx(sum(jobs))
    assert max(max(jobs), sum(jobs) / 3) <= time_left([], jobs, 3) <= sum(jobs) / 3 + max(jobs)


def test_processes_are_spread_over_the_gpus(tmp_path: Path) -> None:
    workers = Workers(["3", "5"])
    words = [sys.executable, "-c", "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES']); sys.exit(4)"]
    for name in "abcd":
        workers.start(name, words, tmp_path / name)
    codes: dict[str, int] = {}
    while len(codes) < 4:
        codes |= workers.ended()
    assert codes == dict.fromkeys("abcd", 4)
    assert [(tmp_path / name).read_text().strip() for name in "abcd"] == ["3", "5", "3", "5"]
    workers.start("e", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "e")
    workers.stop()
    assert not workers.running


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"])
@pytest.mark.parametrize(("count", "given", "expected"), [(3, None, "2"), (9, None, "1"), (3, "5", "5")])
def test_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, count: int, given: str | None, expected: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    workers = Workers([], count=count)
    workers.start("a", ["sh", "-c", f"echo ${name}"], tmp_path / "a")
    while not workers.ended():
        time.sleep(0.01)
    assert (tmp_path / "a").read_text().strip() == expected


@pytest.mark.long
@pytest.mark.usefixtures("forked_commands")
def test_a_few_models_from_training_to_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two seeds of two variants, for two steps on a CPU. The second command trains nothing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(seeds.results, "OUT", tmp_path / "results")
    line = ["seeds", "--out", str(tmp_path / "seeds"), "--variants", "standard", "ladder", "--seeds", "1", "2"]
    line += ["--tokens", "4200", "--batch", "2", "--stories", "3", "--items", "2", "--processes", "2"]
    monkeypatch.setattr(sys, "argv", [*line, "--", "--device", "cpu", "--micro-batch", "1"])
    started = time.time()
    seeds.main()
    folder, found = tmp_path / "seeds", json.loads((tmp_path / "results" / "accuracy-seeds.json").read_text())
    assert [(one["variant"], one["seeds"], one["pairs"]) for one in found["summary"][1:]] == [("ladder", [1, 2], 2)]
    for one in found["rows"]:
        assert one["training_settings"]["more"] == ["--device", "cpu", "--micro-batch", "1"]
        assert one["training"]["settings"]["steps"] == 2 and one["training"]["settings"]["micro_batch"] == 1
        assert 0 < one["training"]["seconds"] < time.time() - started
        assert [len(right) for right in one["answers"].values()] == [2] * len(seeds.TASKS) and len(one["stories"]) == 3
        assert 5 < seeds.nats(one) < 8  # of 2,048 tokens, hardly trained
    assert len({seeds.nats(one) for one in found["rows"]}) == 4
    assert len((tmp_path / "results" / "accuracy-seeds.md").read_text().split("| median seed |")) == 2
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    seeds.main()
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}


def test_options_that_the_command_sets_are_refused_after_the_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["seeds", "--", "--compile", "--batch", "4"])
    with pytest.raises(UserError, match="--batch after --"):
        seeds.parse_args()


def test_the_seconds_of_a_resumed_run_include_those_before(tmp_path: Path) -> None:
    lines = [{"step": 20, "step_ms": 50.0}, {"step": 30, "step_ms": 100.0}, {"step": 50, "step_ms": 10.0}]
    assert seconds_of(lines) == pytest.approx(1.0 + 1.0 + 0.2)
    assert seconds_of([]) == 0


class Tries:
    """The command with models that take no time. `given`: what was trained and evaluated, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder, self.given = patch, folder, list[str]()
        self.most = 99  # models that a command works on before it is stopped
        self.line = ["seeds", "--out", str(folder), "--variants", "standard", "ladder", "--seeds", "1", "2", "--items", "4"]
        write_tokens(folder / "tokens.bin", np.arange(500) % 1024, 1024, "none")
        patch.setattr(seeds.results, "OUT", folder / "results")
        patch.setattr(seeds.train_tiny, "main", self.train)
        patch.setattr(seeds, "opened", lambda path: path)
        patch.setattr(seeds, "evaluate", self.evaluate)
        patch.setattr(seeds.Crew, "work", lambda crew: [seeds.work(crew.args, one) for one in crew.todo[: self.most]])

    def train(self, argv: list[str]) -> None:
        words = dict(pairwise(argv))
        model = Path(words["--out"]) / f"tiny-{words['--variant']}"
        model.mkdir()
        record = dict.fromkeys(("tokens_in_corpus", "seconds", "machine", "torch"), 0) | {"settings": {"seed": words["--seed"]}}
        (model / "training.json").write_text(json.dumps(record))
        (model / "model.safetensors").write_bytes(random.randbytes(8))
        shutil.copy(MODELS / model.name / "config.json", model)
        self.given.append(f"train {model.parent.name}")

    def evaluate(self, path: Path, stories: int, items: int) -> dict[str, Any]:
        self.given.append(f"evaluate {path.parent.name}")
        found = row("", 0, 0.9, items)
        return {key: found[key] for key in ("stories", "answers")}

    def run(self, *more: str) -> list[str]:
        """What the command did."""
        self.given.clear()
        self.patch.setattr(sys, "argv", [*self.line, "--data", str(self.folder / "tokens.bin"), *more])
        seeds.main()
        return list(self.given)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> Tries:
    return Tries(monkeypatch, tmp_path)


NAMES = ["standard-1", "ladder-1", "standard-2", "ladder-2"]  # of each seed slow variants first
AGAIN = [f"evaluate {name}" for name in NAMES]


def test_a_stopped_command_goes_on(tries: Tries) -> None:
    tries.most = 2
    with pytest.raises(UserError, match="not ready: standard-2, ladder-2"):
        tries.run()
    assert tries.run() == [f"{what} {name}" for name in NAMES[2:] for what in ("train", "evaluate")]
    assert "| ladder | 2 |" in (tries.folder / "results" / "accuracy-seeds.md").read_text()
    assert json.loads((tries.folder / "ladder-2" / "tiny-ladder" / "training.json").read_text())["models_at_a_time"] == 1
    assert tries.run() == []


def test_kept_models_are_evaluated_again(tries: Tries) -> None:
    """With other settings of evaluation, or by other code. They are not trained again."""
    tries.run()
    assert tries.run("--items", "5") == AGAIN
    tries.patch.setattr(seeds, "code_digest", lambda: "other")
    assert tries.run("--items", "5") == AGAIN
    whole = (tries.folder / "ladder-2.json").read_bytes()
    (tries.folder / "ladder-2.json").write_bytes(whole[: random.randrange(len(whole))])
    assert tries.run("--items", "5") == ["evaluate ladder-2"]
    assert "versions of the code" not in (tries.folder / "results" / "accuracy-seeds.md").read_text()
    assert "train ladder-3" in tries.run("--items", "5", "--seeds", "1", "2", "3")
    assert "by 2 versions of the code" in (tries.folder / "results" / "accuracy-seeds.md").read_text()
    shutil.rmtree(tries.folder / "standard-2" / "tiny-standard")
    assert tries.run("--items", "6") == [*AGAIN[:2], "train standard-2", *AGAIN[2:]]


def test_a_model_whose_second_training_is_stopped_is_trained_again(tries: Tries) -> None:
    tries.run()
    model, made = tries.folder / "standard-2" / "tiny-standard", seeds.train_tiny.main
    shutil.rmtree(model)

    def killed(words: list[str]) -> None:
        model.mkdir()
        raise KeyboardInterrupt

    tries.patch.setattr(seeds.train_tiny, "main", killed)
    with pytest.raises(KeyboardInterrupt):
        tries.run("--items", "5")
    tries.patch.setattr(seeds.train_tiny, "main", lambda words: (shutil.rmtree(model), made(words)))
    assert "train standard-2" in tries.run("--items", "5")


def test_models_of_other_training_are_refused(tries: Tries) -> None:
    tries.run()
    write_tokens(tries.folder / "others.bin", np.arange(500) % 7, 1024, "none")
    for more in (["--data", str(tries.folder / "others.bin")], ["--tokens", "2e6"], ["--", "--compile"]):
        with pytest.raises(UserError, match="other settings of training"):
            tries.run(*more)
        assert tries.given == []


def test_one_command_works_in_a_folder(tries: Tries) -> None:
    with locked(tries.folder / "command.lock") as mine:
        assert mine
        with pytest.raises(UserError, match="another command works in"):
            tries.run()
    assert len(tries.run()) == 8


def test_a_row_that_does_not_fit_is_the_failure_of_its_model(tries: Tries) -> None:
    tries.run()
    crew = seeds.Crew(seeds.parse_args(), [], math.inf)
    for name, text in (("standard-1", '{"seed"'), ("ladder-1", "{}"), ("ladder-2", None)):
        path = tries.folder / f"{name}.json"
        path.write_text(text) if text else path.unlink()
        crew.end(seeds.Run(name[:-2], int(name[-1])), 0)
    crew.end(seeds.Run("standard", 2), 1)
    assert crew.failed == ["standard-1", "ladder-1", "ladder-2", "standard-2"]
    assert [one.name for one in crew.todo] == crew.failed  # each is tried once more
    crew.end(seeds.Run("standard", 2), 0)
    assert len(crew.failed) == 4 and len(crew.evaluations) == 1
    crew.end(seeds.Run("ladder", 1), 1)
    assert len(crew.todo) == 4


@pytest.fixture
def embedded(tries: Tries) -> Path:
    """A folder of embedded models, of which standard has a draft head."""
    models = tries.folder / "models"
    for name in ("tiny-standard", "tiny-ladder"):
        shutil.copytree(MODELS / name, models / name)
        (models / name / "examples.json").write_text(name)
    shutil.rmtree(models / "tiny-ladder" / "draft")
    tries.patch.setattr(seeds, "MODELS", models)
    return models


def test_install_takes_the_models_of_the_median_seeds(tries: Tries, embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(embedded)
    tries.most = 5
    more = ["--items", "50", "--seeds", "1", "2", "3", "--install"]
    with pytest.raises(UserError, match="not ready: ladder-3"):
        tries.run(*more)
    assert contents(embedded) == before  # not before all are ready
    capsys.readouterr()
    tries.run(*more)
    said = capsys.readouterr().err
    found = json.loads((tries.folder / "results" / "accuracy-seeds.json").read_text())
    for entry in found["summary"]:
        shares = {one["seed"]: seeds.share(one, "mean") for one in found["rows"] if one["variant"] == entry["variant"]}
        middle, name = entry["median_seed"], f"tiny-{entry['variant']}"
        assert shares[middle] == statistics.median(shares.values())
        trained = contents(tries.folder / f"{entry['variant']}-{middle}" / name)
        assert contents(embedded / name) == trained | {Path("examples.json"): name.encode()}
        assert f"{name} is now the model of seed {middle}" in said
        assert json.loads((embedded / name / "training.json").read_text())["settings"]["seed"] == str(middle)
    assert said.count("its draft head was removed") == 1 and len(list(embedded.iterdir())) == 2
    (embedded / "tiny-standard" / "draft").mkdir()  # trained again
    tries.run(*more)
    assert (embedded / "tiny-standard" / "draft").exists()
    for file in seeds.TOKENIZER:  # a real model has them
        shutil.copy(MODELS / "tiny-standard" / file, embedded / "tiny-standard")
    shutil.rmtree(tries.folder / "ladder-2" / "tiny-ladder")
    assert tries.run(*more) == ["train ladder-2", "evaluate ladder-2"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("more", [["--embedded"], ["--seeds"]], ids=str)
def test_install_needs_trained_models(tries: Tries, more: list[str]) -> None:
    with pytest.raises(UserError, match="leave out --embedded"):
        tries.run("--install", *more)

"""Bad input ends every rank with exit code 2 and one line that says what to correct. If a rank is lost, the others end, too."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cli
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from config import ModelConfig
from errors import UserError
from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import HYBRID, MODELS, Finished, Here, command, environment
from tests.support.ports import free_port
from tests.support.ranks import Ranks
from tests.support.server_process import ServerProcess
from text.tokenizer_files import load_tokenizer, tokenizer_of
from tp import World, stream_shards, together

TENSORS = "model.safetensors"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capfd)


def check_refused(done: Finished, *words: str) -> None:
    assert done.code == 2, (done.out, done.err)
    assert done.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.err), done.err
    for word in words:
        assert word in done.err, (word, done.err)


# --- flags and prompts ---------------------------------------------------------------------------------------------------

ONCE = ["--prompt", "Once"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--model"]),
        (["--model", "llama-9-1b", "--prompt-ids", "1"], ["llama-9-1b", "llama-3-70b"]),
        (["--model", "tiny:0", "--prompt-ids", "1"], ["0"]),
        (["--model", "no/such/folder", *ONCE], ["no/such/folder"]),
        (["--model", HYBRID, *ONCE, "--variant", "stairs"], ["stairs", "ladder"]),
        (["--model", HYBRID, *ONCE, "--variant", "hybrid:x"], ["x"]),
        (["--model", HYBRID], ["--prompt"]),
        (["--model", HYBRID, "--prompt", ""], ["empty"]),
        (["--model", HYBRID, "--prompt-ids", ""], ["empty"]),
        (["--model", HYBRID, "--prompt-ids", "1,2,1024"], ["1024", "1023"]),
        (["--model", HYBRID, "--prompt-ids=-1,5"], ["-1"]),
        (["--model", HYBRID, "--prompt-ids", "1,two"], ["two"]),
        (["--model", HYBRID, "--prompt-ids", "1.5"], ["1.5"]),
        (["--model", HYBRID, "--prompt-length", "0"], ["--prompt-length"]),
        (["--model", HYBRID, "--prompt-length", "1025", "--score"], ["1025", "1024"]),
        (["--model", HYBRID, "--prompt", "word " * 1500], ["1024"]),
        (["--model", HYBRID, *ONCE, "--max-new-tokens", "1024"], ["1024", "--max-new-tokens"]),
        (["--model", HYBRID, *ONCE, "--frobnicate"], ["--frobnicate"]),
        (["--model", HYBRID, *ONCE, "--speculate", "magic"], ["--speculate", "magic", "ngram"]),
        (["--model", HYBRID, *ONCE, "--draft-tokens", "5"], ["--draft-tokens has no effect here", "--speculate ngram"]),
        (["--model", HYBRID, *ONCE, "--bad\nline"], ["--bad line"]),
        (["--model", HYBRID, *ONCE, "--prompt-ids", "1"], ["--prompt", "--prompt-ids"]),
        (["--model", HYBRID, *ONCE, "--temperature", "-1"], ["temperature", "-1"]),
        (["--model", HYBRID, *ONCE, "--top-p", "0"], ["top_p"]),
        (["--model", HYBRID, *ONCE, "--device", "cpu", "--comm", "nccl"], ["nccl", "gloo"]),
        (["--model", HYBRID, *ONCE, "--profile", "no/such/folder/trace.json"], ["--profile", "no/such/folder"]),
        (["--model", HYBRID, "--prompt-file", "no/such/file"], ["no/such/file"]),
        (["--model", HYBRID, "--prompt-file", str(MODELS / "tiny-hybrid" / TENSORS)], ["UTF-8"]),
        (["--model", HYBRID, "--prompt-file", str(MODELS)], ["--prompt-file"]),
        (["--model", HYBRID, *ONCE, "--stop", "."  , "--stop", ""], ["--stop"]),
        (["--model", HYBRID, "--interactive", "--score"], ["--interactive", "--score"]),
        (["--model", HYBRID, "--interactive", "--num-samples", "2"], ["--interactive", "--num-samples"]),
        (["--model", HYBRID, "--interactive", "--profile", "trace.json"], ["--interactive", "--profile"]),
        (["--model", HYBRID, *ONCE, "--score", "--profile", "trace.json"], ["--score", "--profile"]),
        (["--model", HYBRID, *ONCE, "--score", "--num-samples", "2"], ["--score", "--num-samples"]),
        (["--model", HYBRID, *ONCE, "--score", "--kv-dtype", "fp8"], ["--score", "cache", "--kv-dtype fp8"]),
        (["--model", HYBRID, "--chat", "--prompt-ids", "1"], ["--chat", "--prompt-ids"]),
        (["--model", HYBRID, "--chat", "--prompt-length", "0"], ["--chat", "--prompt-length"]),
        (["--model", "tiny", "--interactive"], ["tokenizer"]),
        (["--model", "tiny", *ONCE], ["tokenizer", "--prompt-ids"]),
    ],
)  # fmt: skip
def test_bad_flags_and_prompts(here: Here, args: list[str], words: list[str]) -> None:
    check_refused(here(*args), *words)


@without_gpu
def test_a_missing_gpu(here: Here) -> None:
    check_refused(here("--model", HYBRID, *ONCE, "--device", "cuda"), "no GPU", "--device cpu")


# --- checkpoints ---------------------------------------------------------------------------------------------------------


def edit(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))

    return apply


def edit_config(**values: object) -> Callable[[Path], None]:
    return edit("config.json", lambda text: json.dumps(json.loads(text) | values))


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        change(tensors)
        save_file(tensors, folder / TENSORS)

    return apply


def copy_of(model: str, to: Path) -> Path:
    return Path(shutil.copytree(MODELS / model, to / model))


def truncate(folder: Path) -> None:
    with (folder / TENSORS).open("r+b") as file:
        file.truncate((folder / TENSORS).stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (edit_config(vocab_size=1000), ["1000", "1024"]),
        (edit_config(num_hidden_layers=9), ["layers.8"]),
        (truncate, [TENSORS]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["no tokenizer", "tokenizer.json", "--prompt-ids"]),
        (edit("tokenizer.json", lambda text: text[:1000]), ["tokenizer.json"]),
    ],
)
def test_bad_checkpoints(here: Here, tmp_path: Path, spoil: Callable[[Path], None], words: list[str]) -> None:
    """`tests/test_checkpoint.py` has all kinds of damage."""
    folder = copy_of("tiny-hybrid", tmp_path)
    spoil(folder)
    check_refused(here("--model", folder, *ONCE), *words)


def lfs_pointer(path: Path) -> None:
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n")


@pytest.mark.parametrize("name", ["config.json", TENSORS, "tokenizer.json"])
def test_a_pointer_of_git_lfs(here: Here, tmp_path: Path, name: str) -> None:
    done = here("--model", spoiled(tmp_path, name, lfs_pointer), *ONCE)
    check_refused(done, name, "git LFS", "`git lfs pull`")


@pytest.mark.parametrize("name", ["", "model-Q4_K_M.gguf"])
@pytest.mark.parametrize("configured", [False, True])
def test_gguf_is_named(here: Here, tmp_path: Path, name: str, configured: bool) -> None:
    """The file, or its folder, also beside a config.json."""
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    if configured:
        shutil.copy(MODELS / "tiny-hybrid" / "config.json", tmp_path)
    check_refused(here("--model", tmp_path / name, *ONCE), str(tmp_path / name), "GGUF", "config.json and safetensors")
    with pytest.raises(UserError, match="is in GGUF"):  # in a server, whose frontend reads no config
        tokenizer_of(str(tmp_path / name))


def test_gguf_beside_other_weights_is_passed_over(here: Here, tmp_path: Path) -> None:
    (folder := copy_of("tiny-hybrid", tmp_path)).joinpath("model.gguf").write_bytes(b"GGUF")
    assert here("--model", folder, *ONCE).code == 0


@pytest.mark.parametrize("config", [None, {"group_size": 64, "bits": 4}])
def test_mlx_is_named(here: Here, tmp_path: Path, config: object) -> None:
    edit_config(quantization={"group_size": 64, "bits": 4}, quantization_config=config)(copy_of("tiny-hybrid", tmp_path))
    check_refused(here("--model", tmp_path / "tiny-hybrid", *ONCE), "MLX", "--quantize int4", "gptq")


# --- draft heads ---------------------------------------------------------------------------------------------------------


def not_finite(folder: Path) -> None:
    edit_tensors(lambda tensors: tensors["fc.weight"].fill_(math.nan))(folder)


OTHER_WIDTH = edit_config(target_hidden_size=64), ["width 64", "192"]


def head_copy(tmp_path: Path, spoil: Callable[[Path], None]) -> Path:
    folder = Path(shutil.copytree(MODELS / "tiny-standard" / "draft", tmp_path / "head"))
    spoil(folder)
    return folder


def test_a_bad_draft_head(here: Here, tmp_path: Path) -> None:
    folder = head_copy(tmp_path, OTHER_WIDTH[0])
    check_refused(here("--model", MODELS / "tiny-standard", *ONCE, "--speculate", folder), str(folder), *OTHER_WIDTH[1])


@pytest.mark.parametrize(("spoil", "words"), [OTHER_WIDTH, (not_finite, ["fc.weight", "not finite"])])
def test_the_server_says_in_one_line_that_a_draft_head_is_bad(
    tmp_path: Path, spoil: Callable[[Path], None], words: list[str]
) -> None:
    """Before it reads the model's weights, unless the head's values are bad."""
    folder = head_copy(tmp_path, spoil)
    with ServerProcess("--model", MODELS / "tiny-standard", "--speculate", folder, ranks=2) as server:
        assert server.process.wait(120) == 2
        log = server.log
    lines = [line for line in log.splitlines() if "info start-up: " not in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), log
    assert all(word in lines[0] for word in [str(folder), *words]) and "start-up: weights" not in log


# --- hostile checkpoints ---------------------------------------------------------------------------------------------------

HOSTILE: dict[str, dict[str, object]] = {
    "hidden_size 2^40": dict(hidden_size=1 << 40),
    "vocab_size 2^31": dict(vocab_size=1 << 31),
    "vocab_size 2^24": dict(vocab_size=1 << 24),
    "intermediate_size 2^22": dict(intermediate_size=1 << 22),
    "num_hidden_layers 1e9": dict(num_hidden_layers=10**9, ladder_layers=10**9),
    "num_hidden_layers 4096": dict(num_hidden_layers=4096, ladder_layers=2048),
    "num_attention_heads 2^40": dict(num_attention_heads=1 << 40),
    "num_key_value_heads 3": dict(num_key_value_heads=3),
    "head_dim 2^40": dict(head_dim=1 << 40),
    "hidden_size string": dict(hidden_size="192" * 10**5),
    "hidden_size list": dict(hidden_size=[192] * 10**5),
    "rms_norm_eps 1e400": dict(rms_norm_eps=10**400),
    "max_position_embeddings 2^62": dict(max_position_embeddings=1 << 62),
    "ladder_layers huge": dict(ladder_layers=[10**30]),
    "layers of a window": dict(model_type="mistral", ladder_layers=None, layer_types=[{}]),
    "model_type object": dict(model_type={"a": 1}),
    "rope yarn factor 1e300": dict(rope_scaling={"type": "yarn", "factor": 1e300}),
    "desync of 2^40 streams": dict(model_type="rung", residual_variant="desync", desync_streams=1 << 40, desync_pattern=[]),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.mkdir()


def endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)


def many_digits(path: Path) -> None:
    path.write_text('{"hidden_size": 1' + "0" * 10_000 + "}")


def no_utf8(path: Path) -> None:
    path.write_bytes(b'{"a": "\xff"}')


SPOILERS = [pipe, folder_instead, endless_device, huge]
SPOILED_FILES = [
    *(("config.json", spoil) for spoil in [*SPOILERS, deep, many_digits, no_utf8]),
    *((f"{TENSORS}.index.json", spoil) for spoil in [*SPOILERS, deep]),
    *((TENSORS, spoil) for spoil in [pipe, folder_instead, endless_device]),
    *(("tokenizer.json", spoil) for spoil in [*SPOILERS, deep]),
    *(("tokenizer_config.json", spoil) for spoil in [*SPOILERS, deep]),
    ("chat_template.jinja", huge),
]


def spoiled(to: Path, name: str, spoil: Callable[[Path], None]) -> Path:
    """A copy of a checkpoint in which `spoil` has replaced the file `name`."""
    folder = copy_of("tiny-hybrid", to)
    if (folder / name).exists():
        (folder / name).unlink()
    if name.endswith(".index.json"):  # which is read if there is no single file
        (folder / TENSORS).unlink()
    spoil(folder / name)
    return folder


@pytest.mark.timeout(300)  # a program that opens a named pipe would wait for a writer without end
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configs(here: Here, tmp_path: Path, case: str) -> None:
    folder = copy_of("tiny-hybrid", tmp_path)
    edit_config(**HOSTILE[case])(folder)
    done = here("--model", folder, *ONCE)
    check_refused(done)
    assert len(done.err) < 1000


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "spoil"), SPOILED_FILES)
def test_what_is_no_file_of_usual_size(here: Here, tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    done = here("--model", spoiled(tmp_path, name, spoil), *ONCE)
    check_refused(done, name)
    assert len(done.err) < 1000


def test_a_preset_that_no_memory_holds(here: Here) -> None:
    """The model (15 TB in fp32) is refused before its memory is allocated."""
    began = time.monotonic()
    done = here("--model", "llama-3.1-405b", "--prompt-ids", "1", "--max-new-tokens", "1")
    check_refused(done, "16", "GB", "free")
    assert time.monotonic() - began < 60


def refusals(
    world: World, folders: list[Path], dtype: torch.dtype = torch.float32, quantize: str | None = None, text: bool = False
) -> list[str]:
    """The error message for each checkpoint, "" for none. text: its tokenizer is read, too."""

    def config_of(folder: Path) -> ModelConfig:
        config = model_config(str(folder), None, world.world_size, quantize)
        stream_shards(config, world.rank, world.world_size)
        if text:
            load_tokenizer(folder)
        return config

    found = []
    for folder in folders:
        try:
            load_model(str(folder), together(world, partial(config_of, folder)), world, dtype)
            found.append("")
        except UserError as e:
            found.append(str(e))
    return found


def test_two_ranks_refuse_hostile_checkpoints_alike(ranks: Ranks, in_turn: Callable[..., int], tmp_path: Path) -> None:
    """Every third configuration; `test_hostile_configs` tries all of them on one rank."""
    folders = []
    for i, change in enumerate(list(HOSTILE.values())[in_turn((0, 1, 2), 0) :: 3]):
        folders.append(copy_of("tiny-hybrid", tmp_path / str(i)))
        edit_config(**change)(folders[-1])
    folders += [spoiled(tmp_path / f"{name}-{spoil.__name__}", name, spoil) for name, spoil in SPOILED_FILES[:-1]]
    first, second = ranks.run(2, refusals, folders, torch.float32, None, True)
    assert first == second
    for folder, message in zip(folders, first, strict=True):
        assert message and "\n" not in message, folder


# --- on ranks ------------------------------------------------------------------------------------------------------------


class Started:
    """Ranks that are started without a launcher."""

    def __init__(self, args_by_rank: Sequence[Sequence[object]], folder: Path) -> None:
        ranks = len(args_by_rank)
        port = free_port()
        self.processes = []
        self.outputs = [(folder / f"out{r}", folder / f"err{r}") for r in range(ranks)]
        for rank, (args, (out, err)) in enumerate(zip(args_by_rank, self.outputs, strict=True)):
            env = environment(
                RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            )
            with out.open("wb") as stdout, err.open("wb") as stderr:
                self.processes.append(quick_start.Popen(command(args), cwd=ROOT, env=env, stdout=stdout, stderr=stderr))

    def out(self, rank: int) -> str:
        return self.outputs[rank][0].read_text()

    def err(self, rank: int) -> str:
        return self.outputs[rank][1].read_text()

    def wait(self, timeout: float) -> list[int | None]:
        """The exit codes, by rank: the negative signal number if a signal killed the rank, None if it still runs."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.poll() for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(*args_by_rank: Sequence[object]) -> Started:
        started.append(Started(args_by_rank, tmp_path))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.close()


def wait_for(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("ranks", "args", "words"),
    [
        (2, ["--model", "llama-9-1b", "--prompt-ids", "1"], ["llama-9-1b"]),
        (2, ["--model", HYBRID, *ONCE, "--frobnicate"], ["--frobnicate"]),
        (2, ["--model", HYBRID, *ONCE, "--comm", "hierarchical"], ["--comm hierarchical needs several hosts"]),
        (3, ["--model", "tiny", "--prompt-ids", "1"], ["heads", "3 ranks"]),
        (3, ["--model", str(MODELS / "tiny-desync-2x"), *ONCE], ["4 streams", "divides 4"]),
        pytest.param(2, ["--model", HYBRID, *ONCE, "--device", "cuda"], ["no GPU"], marks=without_gpu),
    ],
)
def test_every_rank_leaves_with_2_and_one_of_them_says_why(
    start: Callable[..., Started], ranks: int, args: list[str], words: list[str]
) -> None:
    started = start(*[args] * ranks)
    assert started.wait(200.0) == [2] * ranks
    check_refused(Finished(2, started.out(0), started.err(0)), *words)
    assert [started.out(r) + started.err(r) for r in range(1, ranks)] == [""] * (ranks - 1)


def test_an_error_of_one_rank_alone_ends_them_all(start: Callable[..., Started], tmp_path: Path) -> None:
    """For example on two hosts, if the prompt file is missing on one of them."""
    file = tmp_path / "prompt"
    file.write_text("Once")
    common = ["--model", HYBRID, "--prompt-file"]
    started = start([*common, file], [*common, "no/such/file"])
    assert started.wait(200.0) == [2, 2]
    check_refused(Finished(2, started.out(0), started.err(0)), "no/such/file")
    assert started.out(1) + started.err(1) == ""


# --- lost ranks ----------------------------------------------------------------------------------------------------------

LONG = ["--model", HYBRID, *ONCE, "--max-new-tokens", 900, "--ignore-eos", "--num-samples", 10_000]


def test_when_a_rank_is_killed_the_others_end_by_themselves(start: Callable[..., Started], in_turn: Callable[..., int]) -> None:
    started, lost = start(LONG, LONG), in_turn((0, 1), 0)
    wait_for(lambda: len(started.out(0)) > 100, 200.0)
    started.processes[lost].kill()
    assert started.wait(200.0)[1 - lost] == 1
    errors = [line for line in started.err(1 - lost).splitlines() if not line.startswith(("models/", "/", "Once", "["))]
    assert len(errors) == 1, started.err(1 - lost)
    assert errors[0].startswith(f"error: rank {1 - lost} lost the connection to another rank, which ended or was killed (")


# --- ends without an error -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["joined", "joining"])
@pytest.mark.parametrize("message", ["Connection closed by peer [127.0.0.1]:1234", "index out of range"])
def test_only_a_lost_connection_of_ranks_is_no_bug(message: str, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        cli.run(fail)
    left = []
    monkeypatch.setattr(cli, "leave", left.append)
    if ranks == "joined":
        monkeypatch.setattr(cli.os, "_exit", lambda code: None)  # before the destructors; the error goes on here
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    else:
        monkeypatch.setattr(cli, "is_rank", lambda: True)
    with contextlib.nullcontext() if "Connection" in message else pytest.raises(RuntimeError, match="index"):
        cli.run(fail)
    assert left == ([cli.LOST_RANK] if "Connection" in message else [])


@pytest.mark.parametrize(("ending", "code"), [("reader leaves", 0), ("Ctrl-C", cli.INTERRUPTED)])
def test_a_reader_who_leaves_and_ctrl_c_are_no_errors(ending: str, code: int) -> None:
    process = quick_start.Popen(
        command(LONG), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout and process.stderr
        assert process.stdout.read(50)
        if ending == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        assert process.wait(200.0) == code
        err = process.stderr.read().decode()
        assert "Traceback" not in err and "error" not in err, err
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        process.stdout.close()

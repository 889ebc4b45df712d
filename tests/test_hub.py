"""Models by their names on the hub: what is fetched, what is refused, and every place that takes a name. A server on this host
stands for the hub (tests/support/hub.py)."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import constants, file_download

from checkpoints import hub
from engine import LLM
from errors import UserError
from files import model_name
from scripts.sweep.grids import settings_of
from server.downloading import answering
from server.settings import Settings, load_settings
from tests import MODELS, ROOT
from tests.scripts.test_sweep import arguments
from tests.support import quick_start
from tests.support.adapters import write_adapter
from tests.support.command_line import environment, launch
from tests.support.hub import Hub
from tests.support.ports import free_port
from tests.support.server_process import START_SECONDS, ServerProcess, wait_until

MODEL = MODELS / "tiny-standard"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model `org/tiny`, and an empty cache."""
    site = Hub()
    site.add("org/tiny", MODEL)
    for name, value in {"ENDPOINT": site.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
        # of children
        monkeypatch.setenv(f"HF_{name.removeprefix('HF_')}", str(int(value) if isinstance(value, bool) else value))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", site.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv(hub.FETCHED, "")
    yield site
    site.close()


def fetch_anew(name: str, files: str = "model") -> Path:
    """As a process that was just started."""
    hub.os.environ[hub.FETCHED] = ""
    return Path(hub.fetched(name, files))


def test_only_what_is_read_is_fetched_and_once(site: Hub) -> None:
    site.models["org/tiny"] |= dict.fromkeys(
        (
            "README.md",
            "onnx/model.onnx",
            "original/consolidated.00.pth",
            "tiny.gguf",
            "pytorch_model.bin",
            "flax_model.msgpack",
        ),
        b"x",
    )
    folder = fetch_anew("org/tiny")
    read = {
        str(path.relative_to(MODEL))
        for path in MODEL.rglob("*")
        if path.is_file() and path.name not in ("README.md", "training.json")
    }
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == read
    assert all((folder / name).read_bytes() == (MODEL / name).read_bytes() for name in read)
    assert sorted(file for file, _ in site.contents) == sorted(read)
    assert fetch_anew("org/tiny") == fetch_anew("org/tiny@main") == fetch_anew(f"org/tiny@{site.commit('org/tiny')}") == folder
    assert len(site.contents) == len(read)
    assert model_name(str(folder)) == "org/tiny"


def test_an_index_names_the_files_of_the_weights(site: Hub) -> None:
    files = {key: data for key, data in site.models["org/tiny"].items() if not key.endswith(".safetensors")}
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "*"}}).encode()
    weights = {f"model-{i}.safetensors": bytes([i]) for i in range(1, 4)} | {"model.safetensors.index.json": index}
    site.models["org/tiny"] = files | weights
    folder = fetch_anew("org/tiny")
    assert {path.name for path in folder.glob("model*")} == weights.keys() - {"model-3.safetensors"}


def test_a_revision_that_moves_is_fetched_anew(site: Hub) -> None:
    old = fetch_anew("org/tiny")
    site.models["org/tiny"]["generation_config.json"] = b"{}"
    assert hub.fetched("org/tiny") == str(old)  # in this process and its children
    new = fetch_anew("org/tiny")
    assert new != old and (new / "generation_config.json").exists()
    assert [file for file, _ in site.contents].count("model.safetensors") == 1


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (str(MODEL), True),
        ("models/tiny-hybird", True),  # in a folder that exists here
        ("tiny", True),
        ("llama-3-70b:16", True),
        ("./org/tiny", True),
        ("a/b/c", True),
        ("org/tiny", False),
        ("models/tiny-hybird@main", False),
        ("org/tiny@refs/pr/1", False),
    ],
)
def test_what_is_a_name_on_the_hub(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert hub.is_hub_name(name) == (not kept)
    assert not kept or hub.fetched(name) == name


def test_a_server_and_python_serve_folders_without_it(tmp_path: Path) -> None:
    """No process of theirs imports the hub's library or asks the network."""
    stub, mark = tmp_path / "huggingface_hub.py", tmp_path / "mark"
    stub.write_text(f"open({str(mark)!r}, 'w').close()\nraise ImportError('not to be imported')")
    away: dict[str, object] = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_ENDPOINT": "http://127.0.0.1:9"}
    code = f"from engine import LLM; assert LLM({str(MODEL)!r}, tp=2, speculate='auto').generate('Once')[0].text"
    quick_start.run([sys.executable, "-c", code], env=environment(**away), check=True)
    with ServerProcess("--model", MODEL, "--speculate", "auto", ranks=2, environ=away) as server:
        asked = [{"role": "user", "content": "Hi " * 1000}]  # long enough for a worker
        with pytest.raises(openai.BadRequestError, match="tokens"):
            server.ready().client().chat.completions.create(model="tiny-standard", messages=asked)  # type: ignore[arg-type]
        asked = [{"role": "user", "content": "Hi"}]
        assert server.client().chat.completions.create(model="tiny-standard", messages=asked, max_tokens=2)  # type: ignore[arg-type]
    assert not mark.exists()
    assert quick_start.run(
        [sys.executable, "-c", "import huggingface_hub"], env=environment(**away), capture_output=True
    ).returncode
    assert mark.exists()


def config_of(site: Hub, **more: Any) -> bytes:
    return json.dumps(json.loads(site.models["org/tiny"]["config.json"]) | more).encode()


# what is wrong: with the files of org/tiny, or with the process that fetches
FILES: dict[str, Callable[[dict[str, bytes], Hub], Any]] = {
    "config": lambda files, site: files.pop("config.json"),
    "family": lambda files, site: files.update({"config.json": config_of(site, model_type="bert")}),
    "weights": lambda files, site: files.update({"model.gguf": files.pop("model.safetensors")}),
    "unknown": lambda files, site: site.models.pop("org/tiny"),
    "gated": lambda files, site: site.gated.add("org/tiny"),
    "damaged": lambda files, site: site.damaged.add("model.safetensors"),
}
PROCESS: dict[str, tuple[Any, str, Any]] = {
    "full": (hub.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6)),
    "network": (constants, "ENDPOINT", "http://127.0.0.1:9"),
    "cache": (constants, "HF_HUB_CACHE", "/proc/hub"),
}


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ("unknown", r"org/tiny is neither a folder here nor a model at http\S+ \(a private one needs HF_TOKEN\); did you mean"),
        ("gated", "org/tiny is gated: accept its licence at .*/org/tiny, then run `hf auth login` or set HF_TOKEN"),
        ("damaged", "model.safetensors arrived damaged: its hash is not the one that the hub names; start again"),
        ("full", "org/tiny needs .* GB more in .*, where 0.001 GB are free; make room, or set HF_HOME"),
        ("family", "model_type"),
        ("weights", "org/tiny has no weights that are read here; it has .*.gguf.*, but model.safetensors"),
        ("config", "org/tiny has no config.json"),
        ("network", "org/tiny is no folder here and not in the cache .*, and .* cannot be reached"),
        ("cache", "org/tiny cannot be fetched into /proc/hub"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_weights(
    site: Hub, monkeypatch: pytest.MonkeyPatch, breaks: str, says: str
) -> None:
    if breaks in FILES:
        FILES[breaks](site.models["org/tiny"], site)
    else:
        monkeypatch.setattr(*PROCESS[breaks])
    with pytest.raises(UserError, match=says) as error:
        fetch_anew("org/tiny")
    assert "\n" not in str(error.value)
    fetched = [file for file, _ in site.contents]
    assert breaks == "damaged" or not {"model.safetensors", "model.gguf"} & set(fetched)
    if breaks == "damaged":  # nothing of it stays
        site.damaged.clear()
        assert (fetch_anew("org/tiny") / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()


def test_a_revision_that_does_not_exist_is_refused(site: Hub) -> None:
    with pytest.raises(UserError, match=r"org/tiny@next: there is no such revision; see \S+/org/tiny/tree/main"):
        fetch_anew("org/tiny@next")


def test_a_token_opens_a_gated_model(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    site.gated.add("org/tiny")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert (fetch_anew("org/tiny") / "model.safetensors").exists()


def test_a_broken_transfer_goes_on(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    site.breaks["model.safetensors"] = 5000
    assert (fetch_anew("org/tiny") / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert ("model.safetensors", "bytes=5000-") in site.contents


def test_without_the_hub_the_cached_copy_is_used(
    site: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shape = fetch_anew("org/tiny"), "org/shape"
    site.add(shape, MODEL)
    fetch_anew(shape, "config")
    capsys.readouterr()
    monkeypatch.setattr(*PROCESS["network"])
    assert fetch_anew("org/tiny") == folder
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be reached" in line and f"the copy in the cache is used, {folder.name[:12]}" in line
    assert (fetch_anew(shape, "config") / "config.json").exists()
    with pytest.raises(UserError, match="org/shape is not whole in the cache"):  # not random weights
        fetch_anew(shape)


def test_a_hub_that_does_not_answer_is_away(
    site: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch_anew("org/tiny")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "LIST_SECONDS", 0.1)
        assert fetch_anew("org/tiny") == folder
        assert "cannot be reached" in capsys.readouterr().err
        with pytest.raises(UserError, match=r"org/other is no folder here and not in the cache .* cannot be reached"):
            fetch_anew("org/other")


@pytest.mark.parametrize("files", ["config", "adapter", "draft"])
def test_a_use_that_needs_less_fetches_less(site: Hub, files: str) -> None:
    if files == "adapter":
        site.models["org/tiny"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1", "README.md": b"2"}
    expected = {"config": {"config.json"}, "adapter": {"adapter_config.json", "adapter_model.safetensors"}}
    fetch_anew("org/tiny", files)
    assert {file for file, _ in site.contents} >= expected.get(files, {"config.json", "model.safetensors", "tokenizer.json"})
    assert files == "draft" or {file for file, _ in site.contents} == expected[files]


def test_two_processes_at_once_fetch_each_file_once(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits, and no longer than is allowed."""
    code = "from checkpoints.hub import fetched; print(fetched('org/tiny'))"
    site.open.clear()
    pipes: Any = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    first = quick_start.Popen([sys.executable, "-c", code], **pipes)
    wait_until(lambda: any(file == "tokenizer.json" for file, _ in site.contents), START_SECONDS, "a file")
    second = quick_start.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, **pipes)
    assert second.stderr is not None and "waiting for another process" in second.stderr.readline()
    monkeypatch.setattr(hub, "NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(hub, "MOST_HOURS", 1e-6)
    with pytest.raises(UserError, match=r"^org/tiny: another process has been fetching it for 1e-06 hours; end"):
        fetch_anew("org/tiny")
    site.open.set()
    assert first.communicate()[0] == second.communicate()[0] != "" and len({file for file, _ in site.contents}) == len(
        site.contents
    )


# --- what takes a name ---------------------------------------------------------------------------------------------------


def test_generate_takes_names_on_two_ranks(site: Hub) -> None:
    flags = ("--prompt", "Once upon a time", "--temperature", 0, "--max-new-tokens", 8)
    by_name, by_folder = (launch("--model", name, *flags, ranks=2) for name in ("org/tiny", MODEL))
    assert (by_name.code, by_name.out) == (by_folder.code, by_folder.out) == (0, by_name.out)
    assert "org/tiny: " in by_name.err and "snapshots" not in by_name.err
    assert len({file for file, _ in site.contents}) == len(site.contents)


def test_a_server_says_what_is_here_and_has_the_names_of_the_hub(site: Hub, tmp_path: Path) -> None:
    site.add("org/adapter", write_adapter(tmp_path / "adapter", MODEL))
    site.open.clear()
    with ServerProcess("--model", "org/tiny", "--lora", "fox=org/adapter", "--speculate", "org/tiny", ranks=2) as server:
        said = wait_until(lambda: (server.health() == 503) and server.http.get("/health"), START_SECONDS, "an answer")
        assert re.fullmatch(r"downloading(, [0-9.e-]+ of [0-9.e-]+ GB)?", said.json()["status"]), said.text
        assert "retry-after" in said.headers
        site.open.set()
        server.ready()
        served = {model["id"]: model["root"] for model in server.http.get("/v1/models").json()["data"]}
        assert served == {"org/tiny": "org/tiny", "fox": "org/adapter"}
        for name in served:
            answer = server.client().chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
            )
            assert answer.model == name
        assert server.http.get("/get_model_info").json()["model_path"] == "org/tiny"
        assert 'model_name="org/tiny"' in server.http.get("/metrics").text and "snapshots" not in server.log
    assert len({file for file, _ in site.contents}) == len(site.contents)


def test_a_server_says_on_one_line_that_a_model_cannot_be_had(site: Hub) -> None:
    with ServerProcess("--model", "org/none", ranks=2) as server:
        assert server.wait(START_SECONDS) == 2
        (line,) = server.log.splitlines()
        assert line.startswith("error: org/none is neither a folder here nor a model at")


def test_bytes_that_are_here_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model="m", port=(port := free_port()))
    with answering(settings), hub.tqdm(total=141_000_000_000, initial=41_000_000_000, disable=True) as bar:
        bar.n = 41_000_000_000
        monkeypatch.setattr(hub, "bar", bar)
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={})
    assert answer.status_code == 503 and answer.json()["status"] == "downloading, 41 of 141 GB"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_the_planner_fetches_the_config_alone(site: Hub) -> None:
    command = [sys.executable, "-m", "deploy.plan", "--model", "org/tiny", "--gpus", "2", "--ttft", "500", "--itl", "20"]
    command += ["--prompt", "100", "--answer", "50"]
    done = quick_start.run(command, cwd=ROOT, capture_output=True, text=True)
    assert [file for file, _ in site.contents] == ["config.json"]
    assert "--model org/tiny" in done.stdout, done.stderr


def test_python_takes_names(site: Hub, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", MODEL)
    site.add("org/adapter", adapter)
    by_name, by_folder = LLM("org/tiny", lora="org/adapter", speculate="org/tiny"), LLM(MODEL, lora=adapter)
    assert by_name.generate("Once")[0].text == by_folder.generate("Once")[0].text


def test_a_name_on_the_hub_is_the_served_name() -> None:
    settings = load_settings(["--model", "org/tiny@main", "--lora", "tiny=org/adapter"])
    assert settings.model_names == ("org/tiny",) and settings.needs_hub


def test_a_sweep_takes_names_of_the_hub(site: Hub) -> None:
    """The rows keep the name, and each process finds the folder that was fetched before the first launch."""
    (setting,) = settings_of(arguments("--models", "org/tiny", "--tp", 1, "--batch-sizes", 1, "--variants", "standard"))
    assert setting.model == "org/tiny" and Path(json.loads(os.environ[hub.FETCHED])["org/tiny"], "config.json").exists()

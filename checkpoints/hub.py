"""Models by their names on the Hugging Face Hub, `ORG/NAME` or `ORG/NAME@REVISION`, in the cache that other programs also use.

`huggingface_hub` fetches, and reads HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Only files that are read here are
fetched, with the weights in one format. What refuses a model is found before the first byte of its weights.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checkpoints.hf_config import read_config
from checkpoints.presets import instead
from cli import note
from errors import UserError, first_line
from files import AUTOGPTQ, INDEX_BYTES, WEIGHTS, read_json
from ranks.processes import local_rank, several_hosts

NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}(@[\w./-]{1,200})?", re.ASCII)
FETCHED = "RUNG_FETCHED"  # the folders by name, as JSON, for the processes that this one starts
SMALL = (  # what is read beside the weights
    *("config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "examples.json", "draft/config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "*_Pooling/config.json"),
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
SPARE_BYTES = 1 << 28  # of free space beside the files
HASH_BYTES = 1 << 22  # read at a time
LIST_SECONDS = 30.0  # for the list of a model's files
NOTICE_SECONDS = 2.0  # after which a process says that it waits for another one
MOST_HOURS = 12.0  # that it waits

bar: "tqdm[Any] | None" = None  # of the bytes that are being fetched


def is_hub_name(name: str) -> bool:
    """Whether a value of `--model` names a model on the hub. A path that exists is a path. So is a name in a folder that exists, such
    as a mistyped `models/tiny-hybird`, unless it has a revision."""
    if not NAME.fullmatch(name) or Path(name).exists():
        return False
    return "@" in name or not Path(name.partition("/")[0]).is_dir()


def fetched(name: str, files: str = "model") -> str:
    """The folder in the cache of a model on the hub, once its files are there. Any other `name` as it is.

    files: "model", whose config must be one that is served; "draft", which may be a draft head; "config" alone; or "adapter". Raises
    UserError in one line that says what to do."""
    known = json.loads(os.environ.get(FETCHED) or "{}")
    if name in known or not is_hub_name(name):
        return str(known.get(name, name))
    with ExitStack() as stack:
        if several_hosts():
            from ranks.hosts import awaited  # which needs torch

            stack.enter_context(awaited())
        folder = _fetch(name, files)
    if files != "config":
        os.environ[FETCHED] = json.dumps({**known, name: folder})
    return folder


def fetch_named(args: argparse.Namespace, **files: str) -> None:
    """Replace what arguments name on the hub by its folder: `fetch_named(args, model="model", speculate="draft")`."""
    for name, what in files.items():
        if value := getattr(args, name):
            setattr(args, name, type(value)(fetched(str(value), what)))


def fetch_checkpoint(args: argparse.Namespace) -> None:
    """Replace `args.model` by the folder of a checkpoint. Raises UserError if there is none."""
    fetch_named(args, model="model")
    if not args.model.is_dir():
        raise UserError(f"--model {args.model} is no directory; name a checkpoint's, or a model on the hub")


def _fetch(name: str, files: str) -> str:
    from filelock import FileLock, Timeout  # not imported for folders
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f".rung--{name.partition('@')[0].replace('/', '--')}.lock")  # one process of a host fetches
        try:
            turn = lock.acquire(timeout=NOTICE_SECONDS)
        except Timeout:
            note(f"{name}: waiting for another process, which fetches it …")
            turn = lock.acquire(timeout=MOST_HOURS * 3600)
        with turn:
            return str(_Repo(name, cache).fetch(files))
    except Timeout:
        raise UserError(
            f"{name}: another process has been fetching it for {MOST_HOURS:g} hours; end it, and start again"
        ) from None
    except OSError as e:
        raise UserError(
            f"{name} cannot be fetched into {cache} ({_why(e)}); make room, or set HF_HOME to another place"
        ) from None


class _Repo:
    """The files of one revision of a model on the hub."""

    def __init__(self, name: str, cache: Path) -> None:
        """Ask the hub for them, or the cache for the revision that it has. Raises UserError."""
        from huggingface_hub import HfApi, constants, errors

        self.name, self.cache = name, cache
        self.repo, _, asked = name.partition("@")
        self.page = f"{constants.ENDPOINT}/{self.repo}"
        api = HfApi()
        try:
            info = api.model_info(self.repo, revision=asked or None, files_metadata=True, timeout=LIST_SECONDS)
            self.revision = api.resolve_revision(self.repo, revision=asked or None)  # whose wait has no limit
            self.files: dict[str, Any] = {one.rfilename: one for one in info.siblings or ()}
            self.away = False
        except Exception as e:  # of the network, a proxy or the hub: errors of several libraries
            if refusal := self._refusal(e):
                raise refusal from None
            why = f"{constants.ENDPOINT} cannot be reached ({_why(e)})"
            self.away = True
            try:
                self.revision = api.resolve_revision(self.repo, revision=asked or None, local_files_only=True)
            except (errors.RevisionResolutionError, OSError):
                raise UserError(
                    f"{name} is no folder here and not in the cache {cache}, and {why}; {instead(self.repo)}"
                ) from None
            note(f"{name}: {why}; the copy in the cache is used, {self.revision.resolved[:12]}")

    def _refusal(self, e: Exception) -> UserError | None:
        """What the hub's refusal means, None for another error."""
        from huggingface_hub import errors

        if isinstance(e, errors.GatedRepoError):
            return UserError(
                f"{self.name} is gated: accept its licence at {self.page}, then run `hf auth login` or set HF_TOKEN"
            )
        if isinstance(e, errors.RevisionNotFoundError):
            return UserError(f"{self.name}: there is no such revision; see {self.page}/tree/main, or leave it out")
        if isinstance(e, errors.RepositoryNotFoundError):
            place = f"neither a folder here nor a model at {self.page} (a private one needs HF_TOKEN)"
            return UserError(f"{self.repo} is {place}; {instead(self.repo)}")
        return None

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.repo.replace('/', '--')}" / "snapshots" / self.revision.resolved

    def fetch(self, files: str) -> Path:
        """Fetch what is missing in the cache. Returns the folder."""
        if self.away:
            needed = {"adapter": ADAPTER[1:], "config": ["config.json"]}.get(files, (*WEIGHTS, AUTOGPTQ))
            if not any(True for name in needed for _ in self.folder.glob(name)):
                raise UserError(f"{self.name} is not whole in the cache {self.cache}; start again once the hub can be reached")
            return self.folder
        if files == "adapter":
            self._get(self._present(ADAPTER))
            return self.folder
        if "config.json" not in self.files:
            raise UserError(f"{self.name} has no config.json, so it is no model that is read here; {self._formats()}")
        self._get(self._present(("config.json",) if files == "config" else SMALL))
        if files == "model":
            read_config(self.folder / "config.json")  # what is refused is refused now
        if files != "config":
            self._get([*self._weights(), *self._present(["draft/model.safetensors"])])
        return self.folder

    def _present(self, patterns: Iterable[str]) -> list[str]:
        return [name for pattern in patterns for name in self.files if fnmatch(name, pattern)]

    def _weights(self) -> list[str]:
        """The files of the weights in the format that counts."""
        first = next(iter(self._present([*WEIGHTS, AUTOGPTQ])), None)
        if first is None:
            raise UserError(f"{self.name} has no weights that are read here; {self._formats()}")
        if not first.endswith(".json"):
            return [first]
        self._get([first])
        parts = read_json(self.folder / first, INDEX_BYTES).get("weight_map")
        return sorted({str(part) for part in parts.values()} & self.files.keys()) if isinstance(parts, dict) else []

    def _formats(self) -> str:
        kinds = sorted({Path(name).suffix for name in self.files if self.files[name].size} - {"", ".md", ".json", ".txt"})
        needed = f"{', '.join(WEIGHTS[:2])} and their config.json are needed"
        return f"it has {', '.join(kinds) or 'none'}, but {needed}; name the model that it was made of"

    def _get(self, names: Iterable[str]) -> None:
        """Fetch the files that are not in the cache, and check them."""
        from huggingface_hub import hf_hub_download

        global bar
        todo = [self.files[one] for one in names if not (self.folder / one).exists()]
        size, free = sum(one.size for one in todo), shutil.disk_usage(self.cache).free
        if todo and size + SPARE_BYTES > free:
            raise UserError(
                f"{self.name} needs {gigabytes(size)} more in {self.cache}, where {gigabytes(free)} are free; make room, or set "
                "HF_HOME to another place"
            )
        with tqdm(total=size, desc=self.name, unit="B", unit_scale=True, disable=local_rank() > 0, delay=0.5) as bar:
            for one in todo:
                try:
                    path = hf_hub_download(self.repo, one.rfilename, revision=self.revision, tqdm_class=_part_of(bar))
                except Exception as e:  # of the network, the hub or the disk
                    raise self._refusal(e) or UserError(
                        f"{self.name}: {one.rfilename} cannot be fetched ({_why(e)}); start again: what is complete is kept"
                    ) from None
                _check(Path(path), one)
        bar = None


def _part_of(whole: "tqdm[Any]") -> type:
    """A bar of one file, for huggingface_hub, whose bytes count in `whole`."""

    class Part(tqdm):
        def __init__(self, *given: Any, initial: int = 0, **more: Any) -> None:
            super().__init__(disable=True)
            whole.update(initial)

        def update(self, n: float | None = 1) -> None:
            whole.update(n)

    return Part


def _check(path: Path, file: Any) -> None:
    """Raises UserError, and removes the file, if it does not have the hash that the hub names."""
    digest = hashlib.sha256() if file.lfs else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as content:
        while data := content.read(HASH_BYTES):
            digest.update(data)
    if digest.hexdigest() != (file.lfs.sha256 if file.lfs else file.blob_id):
        path.resolve().unlink()
        path.unlink()
        raise UserError(f"{path.name} arrived damaged: its hash is not the one that the hub names; start again")


def gigabytes(*sizes: float | None) -> str:
    return f"{' of '.join(f'{(size or 0) / 1e9:,.3g}' for size in sizes)} GB"


def _why(e: BaseException) -> str:
    return (e.strerror if isinstance(e, OSError) and e.strerror else first_line(e)) or type(e).__name__

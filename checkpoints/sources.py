"""The files of a checkpoint: safetensors or `torch.save`, in the layouts of Hugging Face and gpt-fast, and the names in them.

Only slices are read, which `checkpoints/weights.py` asks for.
"""

import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from config import FAMILIES, ModelConfig
from errors import UserError, first_line
from files import AUTOGPTQ, INDEX_BYTES, SHOWN, WEIGHTS, check_regular, model_folder, read_json, shown
from quantized.blockwise import STATE, FourBits

SINGLE, INDEX, *_, PTH = WEIGHTS
TABLES = "model.embed_tokens.weight", "lm_head.weight"  # with one row for each token
MAX_TOUCHED_BYTES = 256 * 2**20  # of a mapped `.pth` that may be resident in addition to the model
UNREADABLE = ("F4", "F6_E2M3", "F6_E3M2")  # data types of which safetensors reads no slices


class Source(Protocol):
    """A checkpoint's tensors under their HF names."""

    concurrent: bool  # whether several threads may call `read` at once

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """The slice [start, stop) along `dim`, on the CPU."""
        ...


class Files(ABC):
    """The tensors of a checkpoint's files under the files' own names."""

    concurrent: bool

    def __init__(self, path: Path) -> None:
        """path: a file of tensors, or an index of such files beside it. Raises UserError, also if the two disagree."""
        self.files: dict[str, Path] = {}
        self.remarks: list[str] = []  # what the user should know
        self._shapes: dict[str, tuple[int, ...]] = {}
        index = self._index(path) if path.suffix == ".json" else {}
        paths = set(index.values()) if path.suffix == ".json" else {path}
        self.paths, doubled = paths | {path}, list[str]()
        for file in sorted(paths):
            try:
                check_regular(file)
            except FileNotFoundError:
                raise UserError(f"{file} is missing though the index names it; download the checkpoint again") from None
            self._remark_link(file)
            for name, shape in self._open(file).items():
                if index.get(name, file) != file:
                    doubled.append(name)
                    continue
                self.files[name], self._shapes[name] = file, shape
        if doubled:
            self.remarks.append(f"{path} decides of which file tensors count that several have: {some(doubled)}")
        if lacking := sorted(index.keys() - self.files.keys()):
            where = index[lacking[0]].name
            raise UserError(f"{path} names {where} for {some(lacking)}, which it lacks; download the checkpoint again")

    @staticmethod
    def _index(path: Path) -> dict[str, Path]:
        """The file of each tensor. Raises UserError."""
        names = read_json(path, INDEX_BYTES).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{path} is no index of tensors (weight_map names no files); download the checkpoint again")
        other = [name for name in names.values() if "/" in name or name in ("", ".", "..")]
        if other:
            raise UserError(
                f"{path} names {shown(other[0])}, which is no file of its folder; put all files of a checkpoint there"
            )
        return {tensor: path.parent / name for tensor, name in names.items()}

    def _remark_link(self, file: Path) -> None:
        """A link that leaves the folder is the user's own or a hostile download's. Those of Hugging Face's cache are not remarked."""
        target, folder = file.resolve(), file.parent.resolve()
        if not target.is_relative_to(folder) and target.parent != folder.parent.parent / "blobs":
            self.remarks.append(f"{file} is a link to {target}")

    @abstractmethod
    def _open(self, file: Path) -> dict[str, tuple[int, ...]]:
        """The shapes of the file's tensors. Raises UserError."""

    @abstractmethod
    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """As `Source.read`."""

    @abstractmethod
    def part(self, name: str, *index: int | slice) -> Tensor:
        """What a tensor has at this index, on the CPU."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes


class SafetensorsSource(Files):
    concurrent = True

    def _open(self, file: Path) -> dict[str, tuple[int, ...]]:
        try:
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
                kinds = {name: part.get_dtype() for name, part in slices.items()}
                shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        except (SafetensorError, OSError) as e:
            raise UserError(f"{file} is truncated or no safetensors file ({first_line(e)}); download it again") from None
        if bad := next((name for name, kind in kinds.items() if kind in UNREADABLE), None):
            raise UserError(f"{bad} has data type {kinds[bad]}, which is not supported; convert it again")
        return shapes

    def part(self, name: str, *index: int | slice) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            found: Tensor = file.get_slice(name)[index]
            return found

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        # The file is opened for each tensor, so that its mapped pages are released. A column slice touches every page of its
        # tensor, so otherwise the whole checkpoint could become resident in a rank's memory.
        with safe_open(self.files[name], framework="pt") as file:
            if not self._shapes[name]:
                return file.get_tensor(name)
            part = file.get_slice(name)
            return part[start:stop] if dim == 0 else part[:, start:stop]


class PickledSource(Files):
    """Files of `torch.save`, mapped."""

    concurrent = False

    def __init__(self, path: Path) -> None:
        self.opened: dict[Path, dict[str, Tensor]] = {}
        self.touched = 0
        super().__init__(path)

    def _open(self, file: Path) -> dict[str, tuple[int, ...]]:
        self.opened[file] = unpickled(file)
        return {name: tuple(tensor.shape) for name, tensor in self.opened[file].items()}

    def part(self, name: str, *index: int | slice) -> Tensor:
        found = self._mapped(name)[index]
        self.touched += found.nbytes
        return found

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        whole = self._mapped(name)
        tensor = whole.narrow(dim, start, stop - start) if whole.dim() else whole
        self.touched += tensor.nbytes if dim == 0 else whole.nbytes
        return tensor

    def _mapped(self, name: str) -> Tensor:
        # Pages that were read stay resident until the file is unmapped, so files are opened again after MAX_TOUCHED_BYTES. Doing
        # that for each tensor would be slow: opening a 70B takes 50 ms. A column slice touches every page of its tensor.
        if self.touched > MAX_TOUCHED_BYTES:
            self.opened, self.touched = {}, 0
        file = self.files[name]
        if file not in self.opened:
            self._open(file)
        return self.opened[file][name]


def unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of `torch.save`, mapped. Raises UserError unless it holds only tensors by name."""
    try:
        tensors = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, AttributeError, UnpicklingError) as e:
        raise UserError(f"{path} cannot be read as a dict of tensors ({first_line(e)}); convert it again") from None
    if not isinstance(tensors, dict):
        raise UserError(f"{path} holds no dict of tensors; convert it again")
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            kind = "dict" if isinstance(tensor, dict) else type(tensor).__name__
            raise UserError(
                f"{path} holds a {kind} under {shown(name)}, but must hold tensors by their names; save the dict of them alone, "
                "or convert it again"
            )
    return tensors


# What wraps a model while it is trained or is part of another one, in front of its tensors' names; `model.` may be missing there.
WRAPPED = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
OUTSIDE = r"^(?:(?:base_model|language_model|model)\.)*"
BODY, ENDS = (
    re.compile(OUTSIDE + r"(?=(?:embed_tokens|layers|norm)\.)"),
    re.compile(OUTSIDE + r"(?=(?:lm_head|tok_embeddings|output)\.)"),
)
IMAGES = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")  # of multimodal models
HF_LAYOUT = re.compile(r"\.self_attn\.|\.mlp\.|layernorm\.|^model\.embed_tokens\.|^lm_head\.")
GPT_FAST_LAYOUT = re.compile(r"\.attention\.|\.feed_forward\.|\.(?:attention|ffn)_norm\.|^tok_embeddings\.|^output\.")


# Mixtral's own names of a sparse layer's modules
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MIXED = re.compile(r"\.block_sparse_moe\.(?:(experts\.\d+)\.(w[123])|gate)\.")


def unwrapped(name: str) -> str:
    """A tensor's name as a Llama's checkpoint has it, `model.layers.0.…`, of one that wrappers have changed."""
    name = ENDS.sub("", BODY.sub("model.", WRAPPED.sub("", name))).replace(".mlp.router.", ".mlp.gate.")
    return MIXED.sub(lambda found: f".mlp.{found[1]}.{MIXTRAL[found[2]]}." if found[1] else ".mlp.gate.", name)


class Stacked(NamedTuple):
    """One expert's part of a tensor that gpt-oss's checkpoints have for all experts of a layer.

    `weight` (experts, K, N), or without a transposition `bias` (experts, N), and of MXFP4 `scales` (experts, N, K / 32) and `blocks`
    (experts, N, K / 32, 16). In those of gate and up, the features alternate: step 2, from the first or the second on."""

    theirs: str
    expert: int
    first: int
    step: int
    kind: str

    def read(self, files: Files, dim: int, start: int, stop: int) -> Tensor:
        """As `Source.read`, of (N, …) with all that belongs to a row in one dim."""
        first, step = self.first, self.step
        rows = slice(first, None, step) if dim else slice(first + start * step, first + stop * step, step)
        if self.kind == "weight":
            return files.part(self.theirs, self.expert, slice(start, stop) if dim else slice(None), rows).T
        if not dim:
            found = files.part(self.theirs, self.expert, rows)
            return found.flatten(1) if self.kind == "blocks" else found
        blocks = slice(start // BLOCK, -(-stop // BLOCK))  # of bytes
        begin = start - blocks.start * BLOCK
        return files.part(self.theirs, self.expert, rows, blocks).flatten(1)[:, begin : begin + stop - start]


BLOCK = 16  # bytes
STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(?:_(bias|blocks|scales))?")


def stacked(name: str, theirs: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Stacked, tuple[int, ...]]]:
    """The name, place and shape of each expert's part of the tensor `name`, which the files call `theirs`; none, if it is not stacked."""
    found = STACKED.fullmatch(name)
    if not found or len(shape) != {"bias": 2, "blocks": 4}.get(found[3], 3):
        return
    kind, parts = found[3] or "weight", ("gate", "up") if found[2] == "gate_up" else ("down",)
    n, *others = shape[:0:-1] if kind == "weight" else shape[1:]
    own = (n // len(parts), math.prod(others)) if others else (n // len(parts),)
    for expert, (first, part) in product(range(shape[0]), enumerate(parts)):
        yield f"{found[1]}.{expert}.{part}_proj.{kind}", Stacked(theirs, expert, first, len(parts), kind), own


# What one tensor of the files has of a layer. gpt-fast's checkpoints have the first, and those of families with `fused` the others.
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = {"attention.wqkv": QKV, "self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}


def paired(rows: Tensor, config: ModelConfig, back: bool = False) -> Tensor:
    """Rows (H * D, ...) of q or k with each head's features in the order in which RoPE's pairs are (i, i + D / 2); `back`: in that of
    files. These have pairs (i, i + R / 2) of the first R = `rotary_dim` features, and then those that are not rotated."""
    if config.rotary_dim == config.head_dim:
        return rows
    rotated, rest = torch.arange(config.head_dim).tensor_split([config.rotary_dim])
    order = torch.cat([half for halves in zip(rotated.chunk(2), rest.chunk(2), strict=True) for half in halves])
    return rows.unflatten(0, (-1, config.head_dim))[:, order.argsort() if back else order].flatten(0, 1)


def published(name: str, family: str) -> str:
    """The name with which the family's checkpoints have a tensor."""
    if family == "gpt_oss":
        return name.replace(".mlp.gate.", ".mlp.router.")
    if family != "mixtral" or ".mlp." not in name:
        return name
    for theirs, ours in MIXTRAL.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name.replace(".mlp.", ".block_sparse_moe.")


class ModelSource:
    """The tensors of a model's files under their HF names. Those in 4 bits of bitsandbytes are shown dequantized.

    The names in the files say which layout they have: that of Hugging Face, or gpt-fast's with other names, fused wqkv, and q and
    k in the interleaved RoPE order.
    """

    GPT_FAST = {
        "tok_embeddings.weight": TABLES[0],
        "output.weight": TABLES[1],
        "attention.wo.weight": "self_attn.o_proj.weight",
        "feed_forward.w1.weight": "mlp.gate_proj.weight",
        "feed_forward.w3.weight": "mlp.up_proj.weight",
        "feed_forward.w2.weight": "mlp.down_proj.weight",
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }

    def __init__(self, files: Files, config: ModelConfig) -> None:
        """Raises UserError if the files have tensors of both layouts, or two of the same name."""
        self.files, self.config, self.concurrent = files, config, files.concurrent
        self.names: dict[str, tuple[str, int]] = {}  # HF name: (name in the file, first row in that tensor)
        self.stacked: dict[str, Stacked] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        images = {name for name in files.shapes() if IMAGES.match(name)}
        if images:
            files.remarks.append(
                f"only the text model is read, without {len(images)} tensors for images: {some(sorted(images))}"
            )
        theirs = {name: unwrapped(name) for name in files.shapes() if name not in images}
        first = [next(filter(layout.search, theirs.values()), None) for layout in (HF_LAYOUT, GPT_FAST_LAYOUT)]
        if all(first):
            raise UserError(f"the checkpoint has tensors of two layouts, such as {first[0]} and {first[1]}; convert it again")
        self.gpt_fast, fused = first[1] is not None, FAMILIES[config.family].fused
        if self.gpt_fast and config.rotary_dim != config.head_dim:
            raise UserError(
                "partial_rotary_factor below 1 is not supported in gpt-fast's layout; use the files of Hugging Face"
            )
        for name, hf_name in theirs.items():
            shape, inside = files.shapes()[name], re.sub(r"^model\.layers\.\d+\.", "", hf_name)
            experts = list(stacked(hf_name, name, shape)) if config.family == "gpt_oss" else []
            parts = FUSED.get(inside.removesuffix(".weight"), ()) if fused or inside.startswith("attention.") else ()
            if parts:
                self._add_fused(name, hf_name.removesuffix(inside) + ("self_attn." if parts == QKV else "mlp."), parts, shape)
            elif experts:
                self.stacked |= {own: place for own, place, _ in experts}
                self._shapes |= {own: part for own, _, part in experts}
            else:
                self._add(hf_name.removesuffix(inside) + self.GPT_FAST.get(inside, inside), name, 0, shape)
        if config.tie_embeddings and TABLES[0] not in self.names and TABLES[1] in self.names:  # one table, by its other name
            self._add(TABLES[0], *self.names.pop(TABLES[1]), self._shapes.pop(TABLES[1]))
        self.packed: dict[str, FourBits] = {}
        for weight in [FourBits(name, self._stored, self._shapes) for name in self._shapes if STATE in name]:
            for name in weight.tensors:
                self._shapes.pop(name, None)
            self.packed[weight.name], self._shapes[weight.name] = weight, weight.shape
        if self.packed:
            files.remarks.append(f"{len(self.packed)} weights in 4 bits of bitsandbytes take the memory of --dtype")

    def _add(self, name: str, theirs: str, first: int, shape: tuple[int, ...]) -> None:
        if name in self.names:
            raise UserError(f"the checkpoint has {name} twice, as {self.names[name][0]} and as {theirs}; convert it again")
        self.names[name], self._shapes[name] = (theirs, first), shape

    def _add_fused(self, theirs: str, prefix: str, parts: Sequence[str], shape: tuple[int, ...]) -> None:
        first, c = 0, self.config
        for part in parts:
            rows = c.intermediate_size if parts == GATE_UP else c.head_dim * (c.n_heads if part == "q_proj" else c.n_kv_heads)
            self._add(f"{prefix}{part}.weight", theirs, first, (rows, *shape[1:]))
            first += rows
        if shape[:1] != (first,):
            raise UserError(
                f"{theirs} has shape {shape}, but config.json asks for {first} rows; use the model's own config.json"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.packed[name].read(dim, start, stop) if name in self.packed else self._stored(name, dim, start, stop)

    def _stored(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name in self.stacked:
            return self.stacked[name].read(self.files, dim, start, stop)
        theirs, first = self.names[name]
        tensor = self.files.read(theirs, dim, first + start, first + stop)
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return tensor
        if not self.gpt_fast:
            return paired(tensor, self.config)
        # gpt-fast's RoPE pairs neighbours (0, 1), (2, 3), …; the HF layout pairs i with i + D / 2
        pairs = tensor.unflatten(0, (-1, self.config.head_dim // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)


def open_files(path: Path) -> SafetensorsSource | PickledSource:
    """The files of a checkpoint: those of a folder, also if `path` is a safetensors file in it, or another file of tensors.

    Raises UserError if there are none, if `path` is not one of the folder's checkpoint, or if a file is damaged."""
    if path.is_file() and path.suffix != ".safetensors":
        return PickledSource(path)
    folder = model_folder(path)
    found = [folder / name for name in WEIGHTS if (folder / name).exists()]
    named = sorted(folder.glob(AUTOGPTQ))
    if not found and len(named) > 1:
        raise UserError(f"{folder} has {len(named)} checkpoints, {AUTOGPTQ}; rename the one that you mean to {SINGLE}")
    if not found and not named:
        raise UserError(f"{folder} has none of {', '.join(WEIGHTS)}; name a checkpoint directory or a preset")
    first, *others = found or named
    files = SafetensorsSource(first) if ".safetensors" in first.suffixes else PickledSource(first)
    if others:
        files.remarks.append(f"{folder}: {first.name} counts, and {', '.join(file.name for file in others)} is not read")
    if path != folder and path not in files.paths:
        raise UserError(f"{path} is not part of the checkpoint in its folder, {first.name}; move it to a folder of its own")
    return files


def open_source(name: str, config: ModelConfig) -> ModelSource:
    """The tensors of the checkpoint at path `name`. Raises UserError if there are none or a file is damaged."""
    return ModelSource(open_files(Path(name)), config)


def weights_fingerprint(source: Source, config: ModelConfig) -> str:
    """A hash that is another one once the model has been trained further, but reads little of each tensor.

    Of embedding and head, whose rows may be trained alone, it has the first columns; of a layer's experts it has the first one. Of any
    other tensor it has up to 4 blocks of rows, the first and last ones among them. A block has the rows of a head: fewer cannot be read
    of a source that orders these."""
    found, size = 0, config.head_dim
    for name, shape in sorted(source.shapes().items()):
        if re.search(r"\.experts\.[1-9]", name):
            continue
        blocks = range(0, shape[0] if shape else 1, size)
        pieces = [(0, first, first + size) for first in sorted({*blocks[:: len(blocks) // 3 + 1], *blocks[-1:]})]
        if name in TABLES:
            pieces = [(1, 0, size)]
        for dim, start, stop in pieces:
            part = source.read(name, dim, start, min(stop, shape[dim]) if shape else 1)
            found = zlib.crc32(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), found)
    return f"{found:08x}"


def some(names: list[str]) -> str:
    """The first names of a list, for a message."""
    printed = (name if name.isprintable() and len(name) <= SHOWN else shown(name) for name in names[:3])
    return ", ".join(printed) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

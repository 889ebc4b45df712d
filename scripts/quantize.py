"""Quantize a checkpoint into one in the format of compressed-tensors, which Rung, transformers and vLLM read.

    python -m scripts.quantize --model DIR --out NEW_DIR                            # int4 by GPTQ
    python -m scripts.quantize --model DIR --out NEW_DIR --calibration texts.txt    # with text of the kind that it will write
    python -m scripts.quantize --model DIR --out NEW_DIR --weights fp8              # 8 bits: rounded to nearest

The linear layers of the blocks are quantized; embedding, norms and head stay as they are. Every residual variant can be
quantized. fp8: weights by row, activations by token at run time. int8: weights by row. int4: weights in groups of 128, or
fewer if 128 does not divide the layers' widths. A draft head of the checkpoint's own is copied as it is.

Layers are read, quantized and written one after the other, so memory, or that of the GPU, holds one layer and, for GPTQ, the inputs
of the next one for all samples. If the command is stopped, the same command goes on after the last layer that was written.
"""

import argparse
import json
import math
import resource
import shutil
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from checkpoints.export import add_modeling, save_config, save_tensors
from checkpoints.hf_config import config_to_hf
from checkpoints.hub import fetch_named
from checkpoints.presets import has_random_weights, model_config
from checkpoints.sources import INDEX, Source, weights_fingerprint
from checkpoints.weights import DTYPES, check_plain, check_source, fill, full_shape, module_places, places
from cli import Parser, note, run
from comms import Local, Residual
from config import FAMILIES, ModelConfig, require_dense
from engine.draft_models import EMBEDDED
from engine.llm import encode_texts
from errors import UserError
from files import CONFIG_BYTES, check_folder, model_folder, read_file, read_json, write_whole, writing
from layers.attention import Causal
from layers.linear import ShardedLinear
from layers.rope import rope_frequencies
from model import BLOCKS, Factory, scaled_embeddings
from options import dtype_name, whole_number
from quantized.formats import FORMATS, Slice, Tensors, compressed_tensors
from quantized.gptq import gptq
from quantized.hf import scheme_to_hf
from quantized.scheme import LEAST_GROUP, SCHEMES, Scheme
from quantized.weight import Quantized, check_finite, dequantize, joined, quantize
from scripts.corpus.documents import documents, render
from text.tokenizer_files import load_tokenizer
from tp import SPLITS, World, stream_shards

METHODS = ("rtn", "gptq")
STATE = "quantize.json"  # in the new folder: how it was made, and which command may go on
COPIED = (".json", ".jinja", ".model", ".txt", ".py")  # files beside the weights
LARGEST_COPY = 1 << 28  # bytes
TEXT_BYTES = 256 << 20  # most bytes of a calibration text; the default samples are of about 1 MB
CORPUS_SEED = 5
SAMPLES, LENGTH = 128, 2048  # of GPTQ's calibration text, at most


@dataclass(frozen=True)
class Job:
    """A quantization of one checkpoint: its source, scheme and new folder."""

    config: ModelConfig
    source: Source
    scheme: Scheme
    out: Path
    device: torch.device
    dtype: torch.dtype  # in which GPTQ computes the layers

    def file(self, number: int) -> Path:
        """The weights of layer `number` - 1, or of everything outside the layers for 0."""
        return self.out / f"model-{number + 1:05d}-of-{self.config.n_layers + 1:05d}.safetensors"

    def names(self, number: int) -> list[str]:
        """The source's tensors that belong into file `number`."""
        names, prefix = self.source.shapes(), f"model.layers.{number - 1}."
        return [name for name in names if (name.startswith(prefix) if number else not name.startswith("model.layers."))]

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """The names and shapes (N, K) of a layer's linear layers."""
        names = (name.removesuffix(".weight") for name in self.names(layer + 1))
        parts = {name: name.rpartition(".")[2] for name in names}
        return {name: full_shape(self.config, part) for name, part in parts.items() if part in SPLITS}

    @property
    def stored(self) -> torch.dtype:
        """The data type of the linear layers in the source. The scales in the new file get a type that depends on it."""
        return self.source.read(f"{next(iter(self.linears(0)))}.weight", 0, 0, 1).dtype


def scheme_of(weights: str, config: ModelConfig) -> Scheme:
    """The scheme of --weights, with groups that divide the input features of every layer and of every desync stream's shard."""
    scheme = replace(SCHEMES[weights], format="plain" if SCHEMES[weights].is_float else "packed")
    if scheme.group is None:
        return scheme
    shards = stream_shards(config, 0, 1)
    widths = [len(shard.range(config, axis)) for shard in shards for axis in ("heads", "intermediate")]
    group = math.gcd(scheme.group, config.hidden_size, *widths)
    if group < LEAST_GROUP:
        raise UserError(f"no group of at least {LEAST_GROUP} divides the widths of this model's layers; use --weights int8")
    return replace(scheme, group=group)


# --- GPTQ's inputs ------------------------------------------------------------------------------------------------------------


def calibration(model: str, text: str, config: ModelConfig, samples: int, length: int) -> Tensor:
    """Token ids (samples, length) of a text; fewer samples if it is short. Raises UserError if it has not even one."""
    [ids] = encode_texts(load_tokenizer(Path(model)), [text])
    length = min(length, config.max_seq_len)
    count = min(samples, len(ids) // length)
    if not count:
        raise UserError(f"the calibration text has {len(ids)} tokens, and a sample needs {length}; give more text or --length")
    return torch.tensor(ids[: count * length]).view(count, length)


def corpus(tokens: int) -> str:
    """Text like that of the embedded models' training, of at least about `tokens` tokens."""
    return "\n".join(render(document) for document in documents(CORPUS_SEED, tokens // 50 + 1))


class Calibration:
    """The residual streams of all samples before the next layer. `advance` computes one layer."""

    def __init__(self, job: Job, tokens: Tensor) -> None:
        self.job, self.causal = job, Causal(tokens.shape[1], job.device)
        self.frequencies = rope_frequencies(job.config).to(job.device)
        name, rows = "model.embed_tokens.weight", job.config.vocab_size
        table = job.source.read(name, 0, 0, rows)
        embedded = (scaled_embeddings(F.embedding(s, table)[None].to(job.device, job.dtype), job.config) for s in tokens)
        self.streams: list[Any] = [Residual(x, Local()) for x in embedded]
        self.shards = stream_shards(job.config, 0, 1)
        if job.config.kind.streams:
            self.streams = [[stream] * len(self.shards) for stream in self.streams]

    def block(self, layer: int) -> nn.Module:
        """The block of a layer with its weights as they are in the source."""
        factory: Factory = {"device": self.job.device, "dtype": self.job.dtype}
        block = BLOCKS[self.job.config.variant](self.job.config, layer, self.shards, Local(), factory).requires_grad_(False)
        for place in places(block):
            fill(place, self.job.source)
        return block

    def hessians(self, block: nn.Module) -> dict[nn.Module, Tensor]:
        """The sum of x^T x (K, K) over the inputs x of each linear layer."""
        found: dict[nn.Module, Tensor] = {}

        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2).float()
            if module not in found:
                found[module] = x.new_zeros(x.shape[1], x.shape[1])
            found[module].addmm_(x.T, x)

        hooks = [m.register_forward_pre_hook(add) for m in block.modules() if isinstance(m, ShardedLinear)]
        for stream in self.streams:
            block(stream, self.frequencies, self.causal)
        for hook in hooks:
            hook.remove()
        return found

    def advance(self, layer: int, weights: dict[str, Tensor]) -> None:
        """Compute the layer with these weights in place of the source's."""
        block = self.block(layer)
        for place in places(block):
            if place.name in weights:
                place.tensor.copy_(weights[place.name].narrow(place.dim, place.rows.start, len(place.rows)))
        for i, stream in enumerate(self.streams):  # one after the other, so that memory has each sample's inputs once
            self.streams[i] = block(stream, self.frequencies, self.causal)


# --- layers -------------------------------------------------------------------------------------------------------------------


def rounded(job: Job, layer: int) -> dict[str, Quantized]:
    """A layer's linear layers, rounded to nearest. Raises UserError for those that are codes already."""
    found = {}
    for name, (n, _) in job.linears(layer).items():
        weight = job.source.read(f"{name}.weight", 0, 0, n)
        check_plain(f"{name}.weight", weight)
        found[name] = quantize(weight.to(job.device), job.scheme, name)
    return found


def calibrated(job: Job, layer: int, inputs: Calibration) -> dict[str, Quantized]:
    """A layer's linear layers by GPTQ. A shard of a desync stream has inputs of its own, and is rounded for these."""
    block = inputs.block(layer)
    hessians = inputs.hessians(block)
    parts: dict[str, dict[int, Quantized]] = {}
    dims: dict[str, int] = {}
    for path, module in block.named_modules():
        if not isinstance(module, ShardedLinear):
            continue
        first, whole = 0, gptq(module.weight.to(job.stored), hessians.pop(module), job.scheme, path)
        for place in module_places(module):
            if place.name.endswith(".weight"):
                rows = slice(first, first + len(place.tensor))
                piece = whole._replace(codes=whole.codes[rows], scales=whole.scales[rows])
                name, first = place.name.removesuffix(".weight"), rows.stop
                parts.setdefault(name, {})[place.rows.start], dims[name] = piece, place.dim
    return {name: joined([pieces[start] for start in sorted(pieces)], dims[name]) for name, pieces in parts.items()}


def read_layer(job: Job, layer: int) -> dict[str, Tensor]:
    """The quantized weights of a written layer, dequantized, by their names."""
    stored = load_file(job.file(layer + 1))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}

    def read(name: str, dim: int, start: int, stop: int) -> Tensor:
        return stored[name].narrow(dim, start, stop - start)

    found = {}
    for name, shape in job.linears(layer).items():
        part = Slice(name, shape, range(shape[0]), range(shape[1]), job.scheme)
        found[f"{name}.weight"] = dequantize(FORMATS[job.scheme.format].read(Tensors(part, read, shapes, job.device)))
    return found


def write(job: Job, number: int, layers: dict[str, Quantized]) -> None:
    """Write file `number`: quantized layers, and the source's other tensors of the same layer."""
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for suffix, tensor in compressed_tensors(layer, job.scheme).items():
            tensors[f"{name}.{suffix}"] = tensor.cpu().contiguous()
    for name in job.names(number):
        shape = job.source.shapes()[name]
        if name.removesuffix(".weight") not in layers:
            tensors[name] = job.source.read(name, 0, 0, shape[0] if shape else 0).clone()
            check_plain(name, tensors[name])
            check_finite(tensors[name], name)
    half = job.file(number).with_suffix(".part")
    with writing(job.file(number)):
        save_tensors(tensors, half)
        half.replace(job.file(number))


def is_written(job: Job, number: int) -> bool:
    """Whether an earlier run has written the whole file `number`."""
    try:
        with safe_open(job.file(number), framework="pt") as file:
            found, expected = ({name.rpartition(".")[0] for name in names} for names in (file.keys(), job.names(number)))
            return found == expected
    except (OSError, SafetensorError):
        return False


def quantize_checkpoint(job: Job, tokens: Tensor | None) -> list[float]:
    """Write every file that is not there yet. tokens (samples, length): GPTQ's; None rounds to nearest. Returns the seconds of each
    layer that was written."""
    seconds = []
    if not is_written(job, 0):
        write(job, 0, {})
    missing = [not is_written(job, layer + 1) for layer in range(job.config.n_layers)]
    inputs = Calibration(job, tokens) if tokens is not None and any(missing) else None
    for layer, is_new in enumerate(tqdm(missing, "quantizing", unit="layer")):
        began = time.perf_counter()
        if is_new:
            write(job, layer + 1, rounded(job, layer) if inputs is None else calibrated(job, layer, inputs))
        if inputs is not None and any(missing[layer + 1 :]):
            inputs.advance(layer, read_layer(job, layer))
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += [time.perf_counter() - began] if is_new else []
    weight_map: dict[str, str] = {}
    size = 0
    for number in range(job.config.n_layers + 1):
        tensors = load_file(job.file(number))
        weight_map |= dict.fromkeys(tensors, job.file(number).name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    with writing(job.out):
        (job.out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n")
    return seconds


def costs(seconds: list[float], device: torch.device) -> str:
    """For the user: how long a layer took, and the most memory that was in use: of the GPU, or of this process."""
    if device.type == "cuda":
        most, where = torch.cuda.max_memory_allocated(device), "the GPU's memory"
    else:
        most, where = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "memory"
    time_taken = f"{median(seconds):.2f} s a layer, " if seconds else ""
    return f"{time_taken}at most {most / 1e9:.2f} GB of {where}"


# --- the command --------------------------------------------------------------------------------------------------------------


def begin(out: Path, settings: dict[str, Any]) -> None:
    """Make the new folder, or check that an earlier run of the same command has made it. Raises UserError."""
    check_folder(out)
    if all(file.suffix == ".part" for file in out.iterdir()):  # of a run that was stopped before its first file was whole
        with writing(out / STATE):
            write_whole(out / STATE, json.dumps(settings, indent=2) + "\n")
        return
    try:
        earlier = read_json(out / STATE, CONFIG_BYTES)
    except FileNotFoundError:
        raise UserError(f"{out} has other files; name a new folder") from None
    except UserError:
        raise UserError(f"{out / STATE} does not tell with which settings {out} was begun; name a new folder") from None
    for name, now in settings.items():
        if earlier.get(name) != now:
            raise UserError(
                f"{out} was begun with other settings: {name} {earlier.get(name)}, now {now}; repeat these, or name a new folder"
            )


def finish(model: Path, job: Job) -> None:
    """Copy what belongs to the model besides its weights, with the code for transformers unless it names its own, and write
    config.json, without which nothing loads the folder."""
    folder = model_folder(model)
    with writing(job.out):
        for file in folder.iterdir():
            weights = file.name in ("config.json", STATE) or file.name.endswith(".index.json")
            if file.is_file() and file.suffix in COPIED and not weights and file.stat().st_size < LARGEST_COPY:
                shutil.copyfile(file, job.out / file.name)
        if (folder / EMBEDDED).is_dir():
            shutil.copytree(folder / EMBEDDED, job.out / EMBEDDED, dirs_exist_ok=True)
        raw = read_json(folder / "config.json", CONFIG_BYTES)
        code = {} if "auto_map" in raw else add_modeling(job.out, job.config)
        save_config(raw | code | {"quantization_config": scheme_to_hf(job.scheme)}, job.out)


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, names_model=True, allow_abbrev=False)  # --mode is no --model
    parser.add_argument("--model", metavar="ORG/NAME|DIR", help="a checkpoint in 16 or 32 bits")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the new folder, or that of a run that was stopped"
    )
    parser.add_argument("--weights", choices=tuple(SCHEMES), default="int4", help="default: int4")
    parser.add_argument("--method", choices=METHODS, help="default: gptq for int4, rtn (round to nearest) for 8 bits")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="UTF-8 text for GPTQ (default: text like that of the embedded models)"
    )
    parser.add_argument("--samples", type=whole_number(1), metavar="N", help=f"of the text, at most (default: {SAMPLES})")
    parser.add_argument("--length", type=whole_number(1), metavar="N", help=f"tokens of a sample (default: {LENGTH})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    args = parser.parse_args()
    if args.model is None:
        parser.error("no model; give --model")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU; use --device cpu")
    args.method = args.method or ("gptq" if args.weights == "int4" else "rtn")
    if args.method == "gptq" and args.weights == "fp8":
        raise UserError("--method gptq rounds to integers; use it with --weights int4 or int8")
    for name in ("calibration", "samples", "length"):
        if args.method != "gptq" and getattr(args, name) is not None:
            raise UserError(f"--{name} is for --method gptq, and this rounds to nearest; leave it out, or add --method gptq")
    args.samples, args.length = args.samples or SAMPLES, args.length or LENGTH
    fetch_named(args, model="model")
    return args


@torch.no_grad()  # not inference mode, in which the all-reduces of a stream can be read only once
def quantize_model(
    model: str, out: Path, weights: str, method: str, text: str | None, samples: int, length: int, device: str = "cpu"
) -> str:
    """Quantize checkpoint `model` into the folder `out`. text: GPTQ's calibration, None for the default. Returns what it took, for the
    user. Raises UserError."""
    if has_random_weights(model):
        raise UserError(f"{model} has no weights; name a checkpoint, or use --quantize to serve a preset")
    draft = (model_folder(model) / EMBEDDED).resolve()
    if out.resolve().is_relative_to(draft):
        raise UserError(f"--out {out} is in {draft}, the model's draft head, which is copied; name a folder elsewhere")
    require_dense(config := model_config(model, None, 1), "scripts.quantize")
    if FAMILIES[config.family].fused:
        raise UserError(f"scripts.quantize does not support {config.family} models; serve them with --quantize")
    if config.quantization is not None:
        raise UserError(f"{model} is quantized already ({config.quantization.description}); start from the one in 16 bits")
    dtype, where = DTYPES[dtype_name(None, device)], torch.device(device)
    source = check_source(model, config, World(0, 1, where, Local()), dtype)
    assert source is not None
    job = Job(config, source, scheme_of(weights, config), out, where, dtype)
    length = min(length, config.max_seq_len)
    text = corpus(samples * length) if text is None and method == "gptq" else text
    tokens = calibration(model, text, config, samples, length) if text is not None and method == "gptq" else None
    shape = None if tokens is None else list(tokens.shape)
    same_model = {"config.json": hash_of(json.dumps(config_to_hf(config))), "weights": weights_fingerprint(source, config)}
    begin(out, {**same_model, "method": method, "text": hash_of(text), "scheme": asdict(job.scheme), "calibration": shape})
    seconds = quantize_checkpoint(job, tokens)
    finish(Path(model), job)
    return costs(seconds, where)


def hash_of(text: str | None) -> str | None:
    return None if text is None else f"{zlib.crc32(text.encode()):08x}"


def main() -> None:
    args = parse_args()
    text = None
    if args.calibration is not None:
        try:
            text = read_file(args.calibration, TEXT_BYTES).decode()
        except (FileNotFoundError, UnicodeDecodeError) as e:
            raise UserError(f"--calibration {args.calibration} cannot be read as text ({e}); name a UTF-8 text file") from None
    took = quantize_model(args.model, args.out, args.weights, args.method, text, args.samples, args.length, args.device)
    note(f"wrote {args.out}: {args.weights} by {args.method}; {took}")


if __name__ == "__main__":
    run(main)

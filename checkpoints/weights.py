"""Reading weights: which slices of a checkpoint's tensors a rank needs, and filling its model with them; random weights for presets.

Each rank reads only its own slices: the reader goes through the tensors of the rank's model and reads the slice of each from
the file. `checkpoints/export.py` writes checkpoints.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from checkpoints.hf_config import unread_keys
from checkpoints.memory import check_memory, free_bytes, shortage, weight_bytes
from checkpoints.presets import config_file, has_random_weights
from checkpoints.sources import TABLES, ModelSource, Source, open_source, some
from cli import note
from config import ModelConfig
from errors import UserError
from files import CONFIG_BYTES, read_json
from kernels import determinism
from kernels.linear_host import multiplies_bf16
from layers.attention import Heads, HeadsNorm
from layers.experts import Router
from layers.linear import ShardedLinear
from model import RMSNorm, Transformer
from options import DTYPE_NAMES, dtype_name
from quantized.formats import FORMATS, Shapes, Slice, Tensors
from quantized.scheme import SCHEMES
from quantized.weight import Quantized, QuantizedWeight, joined, quantize
from tp import Shard, World, checkpoint_name, split_of, together

MANY_LAYERS = 256
CACHE_SCALES = (  # of a cache in 8 bits and of attention in 8 bits
    ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".prob_output_scale",
    "q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale",
)  # fmt: skip
COMPARED_ROWS = 4096  # at once, of two tables
LARGE = 1 << 26  # parameters of a model whose weights no processor's cache holds
INT4 = "--quantize int4 rounds to nearest, at which small models lose much accuracy; make quantize writes int4 by GPTQ"
READERS = 8  # threads that read weights for a GPU
DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


# --- where a checkpoint has each tensor of the model ---------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One tensor of the HF layout, and the view into this rank's model that holds the rank's slice of it."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # of the full tensor
    dim: int  # along which `rows` cuts it
    rows: range  # may reach beyond the full tensor: the padding of the vocabulary

    def shapes(self) -> Shapes:
        return {self.name: (self.shape,)}


@dataclass(frozen=True)
class QuantizedPlace:
    """One quantized layer of the HF layout, and the module that takes this rank's slice of it."""

    part: Slice
    module: QuantizedWeight
    dtype: torch.dtype  # of the model

    @property
    def name(self) -> str:
        return self.part.name

    def shapes(self) -> Shapes:
        return {f"{self.part.name}.{suffix}": shapes for suffix, shapes in self.part.shapes().items()}


AnyPlace = Place | QuantizedPlace


def places(model: nn.Module) -> Iterator[Place]:
    """Every checkpoint tensor that this rank's model, or a part of it, needs, with its slice, but for quantized weights. With desync,
    once for each of the rank's streams."""
    return (place for module in model.modules() for place in module_places(module))


def module_places(module: nn.Module) -> Iterator[Place]:
    """The places of a module itself, without those of its children and of quantized weights."""
    if isinstance(module, ShardedLinear):
        for piece, tensor in module.pieces():
            part, _, kind = piece.rpartition(".")
            yield linear_place(module, piece, tensor, f"{checkpoint_name(module.layer, part)}.{kind}")
    elif isinstance(module, RMSNorm | Router):
        for kind, tensor in module.named_parameters(recurse=False):
            yield whole_place(f"{checkpoint_name(module.layer, module.part)}.{kind}", tensor)
    elif isinstance(module, Heads) and module.sinks is not None:
        heads = module.config.n_heads
        yield Place(checkpoint_name(module.layer, "sinks"), module.sinks.data, (heads,), 0, module.own)
    elif isinstance(module, HeadsNorm):
        for part, tensor, axis in (("q_norm", module.q_norm, "heads"), ("k_norm", module.k_norm, "kv_heads")):
            name, full = f"{checkpoint_name(module.layer, part)}.weight", Shard(0, 1).range(module.config, axis)
            yield Place(name, tensor.data, (len(full),), 0, module.shard.range(module.config, axis))


def linear_place(module: ShardedLinear, piece: str, tensor: Tensor, name: str) -> Place:
    """The place of one of a layer's `pieces`, which the checkpoint has as `name`."""
    part, _, kind = piece.rpartition(".")
    split, shape = split_of(part), [*tensor.shape]
    if kind == "bias" and split.dim == 1:  # every shard holds the whole bias
        return whole_place(name, tensor)
    shape[split.dim] = len(Shard(0, 1).range(module.config, split.axis))
    return Place(name, tensor.data, tuple(shape), split.dim, module.own_range(part))


def whole_place(name: str, tensor: Tensor) -> Place:
    """The place of a tensor that every rank has as a whole."""
    return Place(name, tensor.data, tuple(tensor.shape), 0, range(len(tensor)))


def quantized_places(model: Transformer) -> Iterator[QuantizedPlace]:
    """Every quantized layer of which this rank needs a slice."""
    config, dtype = model.config, model.norm.weight.dtype
    for module in model.modules():
        if isinstance(module, ShardedLinear):
            for part, weight in module.quantized_parts():
                (n, k), split = full_shape(config, part), split_of(part)
                rows = module.shard.range(config, split.axis)
                rows = range(min(rows.start, n), min(rows.stop, n)) if split.dim == 0 else rows
                cut = (rows, range(k)) if split.dim == 0 else (range(n), rows)
                yield QuantizedPlace(Slice(checkpoint_name(module.layer, part), (n, k), *cut, weight.scheme), weight, dtype)


def full_shape(config: ModelConfig, part: str) -> tuple[int, int]:
    """(out_features, in_features) of a layer of `tp.SPLITS`, of the full model."""
    split = split_of(part)
    full = len(Shard(0, 1).range(config, split.axis))
    return (full, config.hidden_size) if split.dim == 0 else (config.hidden_size, full)


# --- reading -------------------------------------------------------------------------------------------------------------


def all_places(model: Transformer) -> list[AnyPlace]:
    """Everything that this rank reads."""
    return [*places(model), *quantized_places(model)]


def fill_all(wanted: Sequence[AnyPlace], source: Source, readers: int, progress: bool = False) -> None:
    """`fill` every place, in `readers` threads. If any fail, raises the error of the first of them in the order of `wanted`."""
    inference = torch.is_inference_mode_enabled()  # the mode is per thread

    def fill_here(place: AnyPlace) -> None:
        with torch.inference_mode(inference):
            fill(place, source)

    with ThreadPoolExecutor(readers, "reader") as pool:
        filled = pool.map(fill_here, wanted)
        bar = tqdm(filled, "reading weights", len(wanted), unit="tensor", disable=not progress, leave=False, delay=1)
        for _ in bar:
            pass


def fill(place: AnyPlace, source: Source) -> None:
    """Copy one slice from the checkpoint, and fill the padding with zeros."""
    if isinstance(place, QuantizedPlace):
        tensors = Tensors(place.part, source.read, source.shapes(), place.module.device)
        found = FORMATS[place.part.scheme.format].read(tensors)
        if found.scales.numel() and found.scales.amax().item() * place.part.scheme.largest > torch.finfo(place.dtype).max:
            raise _not_finite(place.name, place.dtype)
        place.module.fill(padded(found, place.module.n))
        return
    stop = min(place.rows.stop, place.shape[place.dim])
    start = min(place.rows.start, stop)
    target = place.tensor.narrow(place.dim, 0, stop - start)
    if place.name == TABLES[1] and place.name not in source.shapes():  # see `check_source`
        target.fill_(torch.nan)
    elif target.numel():
        part = source.read(place.name, place.dim, start, stop)
        check_plain(place.name, part)
        # Copies from pageable memory to a GPU run one at a time. The clone reads the file first, which threads do in parallel.
        target.copy_(part.clone(memory_format=torch.contiguous_format) if target.is_cuda else part)
        # `aminmax` keeps NaN, and takes no memory beside the tensor
        if not torch.stack(torch.aminmax(target)).isfinite().all():
            raise _not_finite(place.name, target.dtype)
    place.tensor.narrow(place.dim, stop - start, len(place.rows) - (stop - start)).zero_()


def check_plain(name: str, tensor: Tensor) -> None:
    """Raises UserError for codes of a quantized tensor, which are no weights without their scales."""
    if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
        raise UserError(f"{name} has data type {tensor.dtype}, but config.json does not say how it is quantized")


def _not_finite(name: str, dtype: torch.dtype) -> UserError:
    return UserError(f"{name} has values that are not finite in {dtype}; download it again, or use another --dtype")


def padded(tensors: Quantized, n: int) -> Quantized:
    """`tensors` with rows of zeros up to `n` output features: the padding of the vocabulary."""
    more = n - len(tensors.codes)
    if not more:
        return tensors
    zeros = None if tensors.zeros is None else tensors.zeros.new_zeros(more, tensors.zeros.shape[1])
    codes, scales = (found.new_zeros(more, found.shape[1]) for found in (tensors.codes, tensors.scales))
    return joined([tensors, Quantized(codes, scales, zeros)])


def check_names(config: ModelConfig, wanted: Iterable[AnyPlace], source: Source) -> list[str]:
    """Raise UserError unless the checkpoint has exactly the tensors that the config needs, each with the right shape. Returns the
    names of those that it has besides and that mean nothing."""
    found = source.shapes()
    expected = {name: shapes for place in wanted for name, shapes in place.shapes().items()}
    if config.tie_embeddings and "lm_head.weight" in found and not _equal(source, *TABLES):
        raise UserError(
            "lm_head.weight differs from the embedding, but config.json has tie_word_embeddings true; set it to false to use "
            "lm_head.weight, as transformers 5 does, or remove this tensor"
        )
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = sorted(name for name in expected.keys() - found.keys() if None not in expected[name])
    unused = {name for name in found.keys() - expected.keys() - optional if _unused(config, name, source)}
    unknown = sorted(found.keys() - expected.keys() - optional - unused)
    if missing:
        raise UserError(f"the checkpoint lacks {some(missing)}; is it complete, and does config.json belong to it?")
    if unknown:
        raise UserError(f"the checkpoint has unknown tensors {some(unknown)}; config.json describes another model")
    for name in sorted(expected.keys() & found.keys()):
        if found[name] not in expected[name]:
            asked = " or ".join(str(shape) for shape in expected[name] if shape is not None)
            raise UserError(
                f"{name} has shape {found[name]}, but config.json asks for {asked}; config.json describes another model"
            )
    return sorted(unused)


def _equal(source: Source, name: str, other: str) -> bool:
    """Whether two matrices are equal."""
    shape, size = source.shapes()[name], COMPARED_ROWS
    if source.shapes()[other] != shape:
        return False
    rows = ((start, min(start + size, shape[0])) for start in range(0, shape[0], size))
    return all(torch.equal(source.read(name, 0, *each), source.read(other, 0, *each)) for each in rows)


def _unused(config: ModelConfig, name: str, source: Source) -> bool:
    """Whether the model needs nothing of this tensor: RoPE's table; the scales of an 8-bit cache, which has its own; of a quantized
    checkpoint biases of zeros, which writers of GPTQ add to every layer."""
    if name.endswith(("rotary_emb.inv_freq", *CACHE_SCALES)):
        return True
    if config.quantization is None:
        return False
    shape = source.shapes()[name]
    return name.endswith("_proj.bias") and len(shape) == 1 and not source.read(name, 0, 0, shape[0]).any()


def random_weights(model: Transformer, seed: int = 0) -> None:
    """Fill `model` on its device: matrices from normal(0, 0.02), norms 1, biases 0.

    The seed of a slice depends on its name and first row, so the replicas of a KV head are equal. Two ranks have other slices
    than one rank, so their model is another one. A GPU's values are drawn on the device and differ from a CPU's: a 70B model on
    8 ranks takes 560 kernels a rank and no work on the host.
    """
    for place in places(model):
        randomize(place, seed)
    for quantized in quantized_places(model):
        quantized.module.fill(rounded_random(quantized, seed))


def rounded_random(place: QuantizedPlace, seed: int) -> Quantized:
    """A slice of random weights, rounded."""
    part, module = place.part, place.module
    full = torch.empty(module.n, module.k, device=module.device, dtype=place.dtype)
    randomize(Place(part.name + ".weight", full, part.shape, *part.cut), seed)
    return quantize(full, part.scheme, part.name)


def randomize(place: Place, seed: int) -> None:
    """Fill one slice of a matrix. Norms and biases keep their initial values."""
    if place.tensor.dim() == 2:
        generator = torch.Generator(place.tensor.device)
        generator.manual_seed(zlib.crc32(f"{seed} {place.name} {place.rows.start}".encode()))
        place.tensor.normal_(0.0, 0.02, generator=generator)


def chosen_dtype(dtype: str | None, name: str, config: ModelConfig, world: World) -> str:
    """The name of --dtype for `--model NAME`, or of its default: on CPUs that multiply bf16, that of a checkpoint in bf16 which is so
    large that reading it takes most of a step. Else float32 on a CPU, bfloat16 on CUDA. Collective."""
    if dtype is not None or world.device.type != "cpu" or determinism.enabled():  # which computes in fp64
        return dtype_name(dtype, world.device.type)
    stored = None if has_random_weights(name) else stored_dtype(name)
    fits = stored == "bfloat16" and config.parameter_count() >= LARGE and multiplies_bf16()
    return "bfloat16" if world.smallest([fits])[0] else "float32"


def stored_dtype(name: str) -> str | None:
    """What config.json says about the data type of a checkpoint's weights."""
    raw = read_json(config_file(name), CONFIG_BYTES)
    return str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")


def load_model(
    name: str,
    config: ModelConfig,
    world: World,
    dtype: torch.dtype,
    seed: int = 0,
    cache_tokens: int = 0,
    kv_dtype: str = "auto",
    adapter_bytes: int = 0,
) -> Transformer:
    """Build this rank's shard of the model and fill it. Collective.

    If any rank has an error, all ranks raise the same UserError. Before anything is allocated, the ranks check that the files
    match `config`, and that there is enough memory for the weights and a KV cache of `cache_tokens` tokens in
    `kv_dtype`. adapter_bytes: of a rank, besides these.
    """
    source = together(world, lambda: check_source(name, config, world, dtype, embeds=True))
    if world.rank == 0 and source is not None:
        for remark in [*source.files.remarks, *unread_keys(config_file(name))]:
            note(remark)
        if config.quantization is not None and any(rule.scheme == SCHEMES["int4"] for rule in config.quantization.rules):
            note(INT4)
    check_memory(name, config, world, dtype, cache_tokens, kv_dtype, adapter_bytes)
    model = together(world, lambda: fill_model(name, source, config, world, dtype, seed))
    if config.quantization is not None and world.comm.name == "fused" and world.rank == 0:
        note("--comm fused: quantized layers are not fused with their all-reduces; these run as with --comm auto")
    return model


def build_model(name: str, config: ModelConfig, world: World, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """`load_model` for a single rank, without communication or the check of memory."""
    return fill_model(name, check_source(name, config, world, dtype), config, world, dtype, seed)


def check_source(name: str, config: ModelConfig, world: World, dtype: torch.dtype, embeds: bool = False) -> ModelSource | None:
    """The tensors of `--model NAME`; None for random weights. embeds: lm_head may be missing, as in published embedding models. It is
    then filled with NaN, so that no request for text gets a wrong one.

    Raises UserError unless the files' headers list the tensors that `config` needs. A model on the meta device, which takes no
    memory, gives the list of needed tensors.
    """
    if has_random_weights(name):
        return None
    source = open_source(name, config)
    check_layers(config, source.shapes())
    hollow = Transformer(config, world.comm, torch.device("meta"), dtype)
    wanted = all_places(hollow)
    if embeds and not config.tie_embeddings and TABLES[1] not in source.shapes():
        wanted = [place for place in wanted if place.name != TABLES[1]]
        source.files.remarks.append(f"{name} has no {TABLES[1]}: only embeddings can be computed, and requests for text fail")
    if unused := check_names(config, wanted, source):
        source.files.remarks.append(f"not read, since the model computes the same without them: {some(unused)}")
    return source


def check_layers(config: ModelConfig, found: Iterable[str]) -> None:
    """For a very deep config, raise UserError unless the names in `found` include the last layer.

    `check_names` would list all missing tensors, but it needs the modules, and building thousands of layers takes seconds.
    """
    numbers = [int(name[1]) for name in map(re.compile(r"model\.layers\.([0-9]{1,6})\.").match, found) if name]
    last = max(numbers, default=-1)
    if last + 1 < config.n_layers and config.n_layers > MANY_LAYERS:
        raise UserError(
            f"the checkpoint lacks layers.{last + 1} of the {config.n_layers} layers that config.json asks for; "
            "is it complete, and does config.json belong to it?"
        )


def fill_model(
    name: str, source: Source | None, config: ModelConfig, world: World, dtype: torch.dtype, seed: int
) -> Transformer:
    """The model on its device with the tensors of `source`, or with random ones for None. Raises UserError."""
    try:
        model = Transformer(config, world.comm, world.device, dtype).eval().requires_grad_(False)
        if source is None:
            random_weights(model, seed)
        else:
            # A CPU rank reads with one thread: ranks share the cores, and many mapped tensors at once would take too much memory.
            readers = READERS if source.concurrent and world.device.type == "cuda" else 1
            fill_all(all_places(model), source, readers, progress=world.rank == 0)
        if not determinism.enabled():  # which dequantizes, and has kernels for plain weights
            for module in model.modules():
                if isinstance(module, ShardedLinear):
                    module.pack(dtype)
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(e):  # on CPUs
            raise
        need = weight_bytes(config, world.world_size, dtype)
        raise UserError(shortage(name, world, need, 0, free_bytes(world.device))) from None
    return model

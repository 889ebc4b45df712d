"""Reading a checkpoint's description of its quantization: `quantization_config` of config.json, or a file beside it. And writing
that of compressed-tensors, which transformers and vLLM read, too.

Whatever is not known to give the right numbers is refused with a message that names it.
"""

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import SchemaError

from errors import UserError
from files import count, get, shown
from quantized.scheme import GROUPS, Quantization, Rule, Scheme, matcher

MOST_NAMES = 10_000  # of layers; a list for every layer of a 405B has 900
MOST_EXPRESSIONS = 100  # among them: a hostile one takes 0.5 s and 10 MB
ALL = ".*"
HEAD = r"lm_head$"
FP8_BLOCK = (128, 128)
INSTEAD = "use the model in 16 bits, which --quantize int4 rounds at load, or with a quant_method of these"


def read_quantization(raw: dict[str, Any]) -> Quantization:
    """raw: the object `quantization_config`, or the whole of `hf_quant_config.json`. Raises UserError for what is not supported."""
    if "quantization" in raw:  # hf_quant_config.json
        raw = {"quant_method": "modelopt", **get(raw, "quantization", dict)}
    if raw.get("load_in_4bit") or raw.get("load_in_8bit"):  # early ones name no method
        raw = {"quant_method": "bitsandbytes"} | raw
    method = get(raw, "quant_method", str)
    if method not in METHODS:
        raise UserError(f"quant_method {shown(method)} is not supported; {INSTEAD}: {', '.join(METHODS)}")
    return METHODS[method](raw)


def _is(raw: dict[str, Any], what: str, **only: Any) -> None:
    """Raise UserError unless each named key, if it is there, has its only supported value, or one of a tuple's."""
    for key, value in only.items():
        values = value if isinstance(value, tuple) else (value,)
        if raw.get(key) is not None and not any(type(raw[key]) is type(v) and raw[key] == v for v in values):
            raise UserError(f"{what}: {key} = {shown(raw[key])} is not supported; supported: {', '.join(map(str, values))}")


def _empty(raw: dict[str, Any], what: str, *keys: str) -> None:
    for key in keys:
        if raw.get(key):
            raise UserError(f"{what}: {key} = {shown(raw[key])} is not supported; use a checkpoint without it")


def _names(raw: dict[str, Any], *keys: str) -> list[str]:
    """The strings in the lists under these keys."""
    found = [name for key in keys for name in get(raw, key, list, [])]
    if len(found) > MOST_NAMES or not all(isinstance(name, str) and len(name) < 200 and name.isprintable() for name in found):
        raise UserError(f"{' or '.join(keys)} must be a list of at most {MOST_NAMES} names of layers")
    return found


def _escaped(name: str) -> str:
    """A regular expression for this text."""
    return "".join(c if c.isalnum() or c == "_" else rf"\x{{{ord(c):x}}}" for c in name)


def _group(size: int | None, what: str) -> int | None:
    """A group size as a `Scheme` has it. -1 stands for a whole row."""
    if size is None or size == -1:
        return None
    if type(size) is not int or size not in GROUPS:
        raise UserError(f"{what}: group_size = {shown(size)} is not supported; supported: {', '.join(map(str, GROUPS))}, -1")
    return size


# --- compressed-tensors -------------------------------------------------------------------------------------------------------

COMPRESSED = {  # format: (type, bits) of the weights
    "float-quantized": [("float", 8)],
    "int-quantized": [("int", 8)],
    "pack-quantized": [("int", 4), ("int", 8)],
    "naive-quantized": [("float", 8), ("int", 8)],
}


def _compressed(raw: dict[str, Any]) -> Quantization:
    what = "compressed-tensors"
    _empty(raw, what, "transform_config")
    _is(raw, what, quantization_status=("compressed", "frozen"))
    sparsity = get(raw, "sparsity_config", dict, {})
    _is(sparsity, f"{what}: sparsity_config", format="dense")
    groups = get(raw, "config_groups", dict)
    rules: list[tuple[str, Scheme]] = []
    for group in groups.values():
        if not isinstance(group, dict):
            raise UserError(f"{what}: config_groups must hold objects, not {shown(group)}")
        scheme = _compressed_scheme(group, group.get("format") or get(raw, "format", str))
        rules += [(target, scheme) for target in _names(group, "targets")]
    _names({"targets": [target for target, _ in rules]}, "targets")  # of all groups: not too many
    # a layer's name counts before an expression, and this before a class; of expressions the first in alphabetical order
    rules.sort(key=lambda rule: (rule[0] == "Linear", rule[0].startswith("re:"), rule[0]))
    ignored = _names(raw, "ignore")
    _few([name for name in (*ignored, *(target for target, _ in rules)) if name.startswith("re:")], what)
    found = [Rule(ALL if target == "Linear" else _pattern(target), scheme) for target, scheme in rules]
    return Quantization(what, tuple(found), tuple(map(_pattern, ignored)))


def _few(expressions: list[str], what: str) -> None:
    if len(expressions) > MOST_EXPRESSIONS:
        raise UserError(f"{what} has more than {MOST_EXPRESSIONS} regular expressions; list the layers' names")


def _pattern(name: str) -> str:
    """A name of compressed-tensors as a regular expression: `re:…` is one, anything else is a layer's whole name."""
    return _expression(name[3:], name, "compressed-tensors") if name.startswith("re:") else _escaped(name) + "$"


def _expression(pattern: str, name: str, what: str) -> str:
    """`pattern`. Raises UserError, which shows it as the file's `name`, if it is no regular expression that `matcher` supports."""
    try:
        matcher(pattern)
    except SchemaError:
        raise UserError(f"{what}: {shown(name)} is not a regular expression without look-around") from None
    return pattern


def _compressed_scheme(group: dict[str, Any], format: Any) -> Scheme:
    what = "compressed-tensors"
    if not isinstance(format, str) or format not in COMPRESSED:
        raise UserError(f"{what}: format {shown(format)} is not supported; supported: {', '.join(COMPRESSED)}")
    _empty(group, what, "output_activations")
    weights, inputs = get(group, "weights", dict), get(group, "input_activations", dict, None)
    kind, bits = get(weights, "type", str, "int"), get(weights, "num_bits", int, 8)
    if (kind, bits) not in COMPRESSED[format]:
        raise UserError(f"{what}: weights of type {shown(kind)} with {shown(bits)} bits are not supported in {format}")
    strategy = get(weights, "strategy", str, "group" if weights.get("group_size") else "tensor")
    _is(weights, f"{what}: weights", dynamic=False, actorder=("group", "weight", "dynamic", "static"))
    rows: int | None = 1
    size = None
    if strategy == "group":
        size = _group(count(weights, "group_size"), what)
    elif strategy == "block":
        if get(weights, "block_structure", list) != list(FP8_BLOCK):
            raise UserError(f"{what}: block_structure = {shown(weights['block_structure'])} is not supported; only [128, 128]")
        rows, size = FP8_BLOCK
    elif strategy == "tensor":
        rows = None
    elif strategy != "channel":
        raise UserError(f"{what}: weights by {shown(strategy)} are not supported; supported: tensor, channel, group, block")
    symmetric = get(weights, "symmetric", bool, True)
    if not symmetric and kind == "float":
        raise UserError(f"{what}: asymmetric float weights are not supported")
    activations = _compressed_activations(inputs, kind, bits, size) if inputs else "none"
    return Scheme(
        "packed" if format == "pack-quantized" else "plain", bits, kind == "float", rows, size, symmetric, activations
    )


def _compressed_activations(inputs: dict[str, Any], kind: str, bits: int, group: int | None) -> str:
    what = "compressed-tensors: input_activations"
    _is(inputs, what, type=kind, num_bits=8, symmetric=True)
    strategy, dynamic = get(inputs, "strategy", str, "tensor"), inputs.get("dynamic", False)
    if bits == 8 and dynamic is True and strategy == "token":
        return "token"
    if bits == 8 and dynamic is True and strategy == "group" and group is not None and inputs.get("group_size") == group:
        return "group"
    if bits == 8 and dynamic is False and strategy == "tensor":
        return "static"
    raise UserError(
        f"{what} by {shown(strategy)}, dynamic {shown(dynamic)}, beside {bits}-bit weights are not supported; supported for 8 "
        "bits: by token, or by the group of the weights, dynamic; by tensor, static"
    )


def scheme_to_hf(scheme: Scheme) -> dict[str, Any]:
    """`quantization_config` of config.json for a model whose linear layers, except the head, all have this symmetric scheme."""
    weights = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.is_float else "int",
        "symmetric": True,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": weights["type"], "symmetric": True, "strategy": "token", "dynamic": True}
    activations = inputs if scheme.activations == "token" else None
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scheme.is_float else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


# --- the others ---------------------------------------------------------------------------------------------------------------


def _parts(names: list[str]) -> tuple[str, ...]:
    """Patterns of layers that have one of `names` as a part of their name: `lm_head`, `self_attn.q_proj`, `layers.0`."""
    return tuple(rf"(.*\.)?{_escaped(name)}(\.|$)" for name in names)


def _fp8(raw: dict[str, Any]) -> Quantization:
    what = "quant_method fp8"
    _is(raw, what, fmt=("e4m3", "float8_e4m3fn"), scale_fmt="float")
    _empty(raw, what, "modules_to_convert")  # of transformers 5, for embeddings in fp8
    activations = get(raw, "activation_scheme", str, "dynamic")
    _is(raw, what, activation_scheme=("dynamic", "static"))
    rows: int | None = None
    group = None
    if raw.get("weight_block_size") is not None:
        if raw["weight_block_size"] != list(FP8_BLOCK):
            raise UserError(f"{what}: weight_block_size = {shown(raw['weight_block_size'])} is not supported; only [128, 128]")
        if activations == "static":
            raise UserError(f"{what}: static activations beside weight_block_size are not supported")
        rows, group = FP8_BLOCK
    dynamic = "group" if group else "token"
    scheme = Scheme("fp8", 8, True, rows, group, activations="static" if activations == "static" else dynamic)
    kept = _parts([*_names(raw, "modules_to_not_convert", "ignored_layers")])
    return Quantization("fp8", (Rule(ALL, scheme),), (*kept, HEAD))


GPTQ = {"gptq": "gptq", "gptq_v2": "gptq-v2"}  # a file's format: `Scheme.format`


def _gptq(raw: dict[str, Any]) -> Quantization:
    what = "gptq"
    formats = [raw[key] for key in ("format", "checkpoint_format") if raw.get(key) is not None]
    if len(formats) == 2 and formats[0] != formats[1]:
        raise UserError(
            f"{what}: format = {shown(formats[0])} and checkpoint_format = {shown(formats[1])} differ; correct one of them"
        )
    raw = raw | {"format": formats[0] if formats else "gptq"}
    _is(raw, what, format=tuple(GPTQ), pack_dtype="int32", is_marlin_format=False)
    _empty(raw, what, "modules_in_block_to_quantize")
    kept = [] if get(raw, "lm_head", bool, False) else [HEAD]
    rules = []
    # GPTQModel's `-:EXPRESSION` names layers that are kept, and other expressions layers that differ. There the first that matches
    # counts. A file for which this is not the same lacks tensors under the names that are expected here, and is refused.
    dynamic = get(raw, "dynamic", dict, {})
    _few(_names({"dynamic": list(dynamic)}, "dynamic"), what)
    for name in dynamic:
        pattern = _expression(name.removeprefix("-:").removeprefix("+:"), name, what)
        if name.startswith("-:"):
            kept.append(pattern)
        else:
            changes = get(dynamic, name, dict)
            _empty(changes, f"{what}: dynamic", "method", "quant_method", "format", "checkpoint_format", "pack_dtype")
            rules.append(Rule(pattern, _gptq_scheme(raw | changes | {"format": raw["format"]})))
    return Quantization(what, (*rules, Rule(ALL, _gptq_scheme(raw))), tuple(kept))


def _gptq_scheme(raw: dict[str, Any]) -> Scheme:
    _is(raw, "gptq", bits=(4, 8))
    group = _group(get(raw, "group_size", int, 128), "gptq")
    return Scheme(GPTQ[raw["format"]], get(raw, "bits", int), group=group, symmetric=get(raw, "sym", bool, True))


GEMM = ("gemm", "GEMM")  # the one layout of AWQ that is read


def _awq(raw: dict[str, Any]) -> Quantization:
    what = "awq"
    raw = {"bits": raw.get("w_bit"), "group_size": raw.get("q_group_size")} | {k: v for k, v in raw.items() if v is not None}
    _is(raw, what, bits=4, version=GEMM, format=GEMM, checkpoint_format=GEMM)
    symmetric = not get(raw, "zero_point", bool, True)  # GPTQModel's default
    scheme = Scheme("awq", get(raw, "bits", int), group=_group(get(raw, "group_size", int), what), symmetric=symmetric)
    return Quantization(what, (Rule(ALL, scheme),), (*_parts(_names(raw, "modules_to_not_convert")), HEAD))


MODELOPT = {
    "FP8": Scheme("plain", 8, True, None, activations="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("plain", 8, True, activations="token"),
}


def _modelopt(raw: dict[str, Any]) -> Quantization:
    if "quant_algo" in raw and raw["quant_algo"] is None:  # only the cache is quantized
        return Quantization("modelopt", ())
    algorithm = get(raw, "quant_algo", str)
    if algorithm not in MODELOPT:
        raise UserError(f"modelopt: quant_algo {shown(algorithm)} is not supported; supported: {', '.join(MODELOPT)}")
    kept = tuple(_escaped(name).replace(r"\x{2a}", ".*") + "$" for name in _names(raw, "exclude_modules", "ignore"))
    return Quantization("modelopt", (Rule(ALL, MODELOPT[algorithm]),), kept)


def _bitsandbytes(raw: dict[str, Any]) -> Quantization:
    """Weights in 4 bits have no scheme: they are dequantized by `blockwise.FourBits`."""
    if not get(raw, "load_in_8bit", bool, False):
        return Quantization("bitsandbytes", ())
    kept = _names(raw, "llm_int8_skip_modules") or ["lm_head"]
    return Quantization("bitsandbytes", (Rule(ALL, Scheme("bitsandbytes", 8)),), _parts(kept))


def _fbgemm(raw: dict[str, Any]) -> Quantization:
    """Without `activation_scale_ub`: no input is clipped."""
    scheme = Scheme("plain", 8, True, activations="token")
    return Quantization("fbgemm_fp8", (Rule(ALL, scheme),), (*_parts(_names(raw, "modules_to_not_convert")), HEAD))


AUTO_ROUND = re.compile(r"auto_round(?::(?:auto_)?(gptq|awq|gptqmodel))?(?::exllamav2)?")


def _auto_round(raw: dict[str, Any]) -> Quantization:
    what = "auto-round"
    packing = get(raw, "packing_format", str, get(raw, "backend", str, "auto_round"))
    if not (found := AUTO_ROUND.fullmatch(packing)):
        raise UserError(f"{what}: packing_format {shown(packing)} is not supported; export it with auto_round:auto_gptq")
    _empty(raw, what, "super_bits", "super_group_size", "rotation_config")
    format = {"gptq": "gptq", "awq": "awq"}.get(found[1], "gptq-v2")  # alone it is as `gptqmodel`: zero points are as they are

    def scheme(settings: dict[str, Any]) -> Scheme:
        _is(settings, what, bits=(4,) if format == "awq" else (4, 8), data_type="int", act_bits=(16, 32))
        group = _group(get(settings, "group_size", int, 128), what)
        return Scheme(format, get(settings, "bits", int), group=group, symmetric=get(settings, "sym", bool, True))

    changes, kept, rules = get(raw, "extra_config", dict, {}), _names(raw, "modules_to_not_convert"), []
    _few([name for name in _names({"extra_config": list(changes)}, "extra_config") if not _is_name(name)], what)
    skipped = list(_parts(kept))
    for name in changes:
        changed = get(changes, name, dict)
        pattern = _parts([name])[0] if _is_name(name) else _expression(name, name, what)
        if get(changed, "bits", int, 0) >= 16:
            skipped.append(pattern)
        else:
            rules.append(Rule(pattern, scheme(raw | {key: value for key, value in changed.items() if value is not None})))
    return Quantization(what, (*rules, Rule(ALL, scheme(raw))), (*skipped, *([] if "lm_head" in changes else [HEAD])))


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+", name) is not None


def _mxfp4(raw: dict[str, Any]) -> Quantization:
    """gpt-oss: experts in MXFP4, and nothing else."""
    kept = tuple(_escaped(name).replace(r"\x{2a}", ".*") + r"(\.|$)" for name in _names(raw, "modules_to_not_convert"))
    scheme = Scheme("mxfp4", 4, is_float=True, group=32)
    return Quantization("mxfp4", (Rule(r"model\.layers\.\d+\.mlp\.experts\.", scheme),), kept)


METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}

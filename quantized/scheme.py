"""How linear layers are quantized. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from pydantic_core import SchemaValidator, core_schema

GROUPS = (16, 32, 64, 128)  # input features that share a scale; a whole row may, too
LEAST_GROUP = GROUPS[0]
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12)  # e2m1's values without a sign, doubled (OCP Microscaling Formats 1.0, section 5.3.3)
ON_LOAD = "on-load"  # the format of a layer that the file has in 16 or 32 bits


@dataclass(frozen=True)
class Scheme:
    """How one linear layer is quantized, and in which format its file has it.

    A weight (N, K) is codes times scales; integers may have a zero point that is subtracted from the code first. A scale belongs
    to a block of `rows` output features by `group` input features; None stands for all of them. Codes of fp4 are twice its values.

    activations: `none` keeps the layer's input; `token` quantizes each row of it by its own largest value, `group` each `group`
    features of each row, both to the weight's data type; `static` divides by a scale of the checkpoint.
    """

    format: str  # a key of `formats.FORMATS`
    bits: int  # 8 or 4
    is_float: bool = False  # fp8 e4m3 or fp4 e2m1 rather than integers
    rows: int | None = 1
    group: int | None = None
    symmetric: bool = True  # no zero points
    activations: str = "none"

    @property
    def is_fp4(self) -> bool:
        return self.is_float and self.bits == 4

    @property
    def largest(self) -> int:
        """No code less its zero point is larger in size."""
        if self.is_float:
            return FP4_VALUES[-1] if self.is_fp4 else 448
        return 2 ** (self.bits - self.symmetric)

    @property
    def name(self) -> str:
        """`int4, group 128`; `fp8, activations by token`."""
        parts = [f"{'fp' if self.is_float else 'int'}{self.bits}"]
        parts += [f"group {self.group}"] if self.group else []
        parts += ["asymmetric"] if not self.symmetric else []
        parts += [f"activations by {self.activations}" if self.activations != "static" else "static activations"]
        return ", ".join(part for part in parts if part != "activations by none")


@dataclass(frozen=True)
class Rule:
    """`scheme` holds for the layers whose full name (`model.layers.0.self_attn.q_proj`) begins with a match of the pattern."""

    pattern: str
    scheme: Scheme

    @cached_property
    def matches(self) -> Callable[[str], bool]:
        return matcher(self.pattern)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a name begins with a match of the regular expression. By pydantic's engine, whose time is linear in the name's
    length: Python's could take hours for a pattern of a checkpoint. Raises SchemaError for a pattern that it does not support."""
    return SchemaValidator(core_schema.str_schema(pattern=rf"\A(?:{pattern})")).isinstance_python


@dataclass(frozen=True)
class Quantization:
    """Which linear layers of a model are quantized, and how. The first rule that matches a layer counts."""

    method: str  # as messages name it: `gptq`, `compressed-tensors`, `--quantize int4`
    rules: tuple[Rule, ...]
    kept: tuple[str, ...] = field(default=())  # regular expressions of the layers that are not quantized

    @cached_property
    def _kept(self) -> list[Callable[[str], bool]]:
        return [matcher(pattern) for pattern in self.kept]

    def scheme(self, name: str) -> Scheme | None:
        """The scheme of the layer named as in the checkpoint; None if it is not quantized."""
        if any(matches(name) for matches in self._kept):
            return None
        return next((rule.scheme for rule in self.rules if rule.matches(name)), None)

    @property
    def description(self) -> str:
        """For messages: `gptq (int4, group 128)`."""
        return f"{self.method} ({'; '.join(dict.fromkeys(rule.scheme.name for rule in self.rules))})"


_BLOCK_LAYERS = r"model\.layers\."
SCHEMES = {  # the values of --quantize, and with `+head`
    "fp8": Scheme(ON_LOAD, 8, is_float=True, activations="token"),
    "int8": Scheme(ON_LOAD, 8),
    "int4": Scheme(ON_LOAD, 4, group=128),
}


QUANTIZATIONS = (*SCHEMES, *(f"{name}+head" for name in SCHEMES))


def on_load(name: str) -> Quantization:
    """The quantization of `--quantize NAME`: all linear layers of the blocks, by rounding to nearest. Embedding and head stay, but
    with `NAME+head` the head becomes int8, too."""
    blocks, head, _ = name.partition("+head")
    rules = (Rule(_BLOCK_LAYERS, SCHEMES[blocks]), Rule("lm_head$", SCHEMES["int8"]))
    return Quantization(f"--quantize {name}", rules if head else rules[:1])

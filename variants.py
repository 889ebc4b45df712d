"""The residual variants: what each value of `--variant` stands for. docs/variants.md has their mathematics.

To add a variant of a known kind, add it to `VARIANTS`. A new kind needs a class of blocks in model.py (`BLOCKS`), too. Every
variant has a row in docs/variants.md and a colour in figures.py. CONTRIBUTING.md has the whole recipe.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from errors import UserError


@dataclass(frozen=True)
class Kind:
    """What the blocks of a model have in common, for a value of `ModelConfig.variant`."""

    shared_input: bool = False  # attention and MLP share a norm, and one fused matrix computes qkv, gate and up
    streams: bool = False  # a checkpoint has several residual streams, and a rank carries some of them
    speed_limit: bool = False  # without all-reduces: for measurements only, and wrong text on several ranks


KINDS = {
    "standard": Kind(),
    "parallel": Kind(shared_input=True),
    "ladder": Kind(),  # in all layers or in some of them
    "desync": Kind(streams=True),
    "upper-bound": Kind(speed_limit=True),
}


@dataclass(frozen=True)
class Variant:
    """A value of `--variant`: NAME, or NAME:NUMBER if `number` is set."""

    name: str
    kind: str  # one of KINDS
    number: str = ""  # what the number counts
    period: int = 1  # desync: of so many successive all-reduces, only the last remains

    @property
    def usage(self) -> str:
        """The name as a help text has it: `hybrid[:LAYERS]`."""
        return f"{self.name}[:{self.number}]" if self.number else self.name


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("standard", "standard"),
        Variant("parallel", "parallel"),
        Variant("ladder", "ladder"),
        Variant("hybrid", "ladder", number="LAYERS"),
        Variant("desync-2x", "desync", number="STREAMS", period=2),
        Variant("desync-4x", "desync", number="STREAMS", period=4),
        Variant("upper-bound", "upper-bound"),
    )
}
TRAINABLE = tuple(variant.name for variant in VARIANTS.values() if not KINDS[variant.kind].speed_limit)


def usage(names: Iterable[str] = tuple(VARIANTS)) -> str:
    """The variants as a help text lists them."""
    return ", ".join(VARIANTS[name].usage for name in names)


def parse_variant(text: str) -> tuple[Variant, int | None]:
    """The variant and the number of a value of `--variant`; None if it has no number. Raises UserError."""
    name, colon, number = text.partition(":")
    variant = VARIANTS.get(name)
    if colon and not (variant and variant.number and number.isdecimal() and int(number) >= 1):
        *others, last = (known.name for known in VARIANTS.values() if known.number)
        raise UserError(
            f"unknown variant {text!r}; only these take a number after the name: {', '.join(others)} and {last}, as in hybrid:16"
        )
    if variant is None:
        raise UserError(f"unknown variant {text!r}; known: {usage()}")
    return variant, int(number) if colon else None

"""How the weights of a safetensors checkpoint are quantized, as facts: which modules, how many
bits, which groups, by which tensors.

Read from config.json by quantization_formats.py. Which tensors stand for a weight:
quantized_tensors.py; what their numbers are: back/quant/formats.
"""

from __future__ import annotations

import re

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization_activations import Activations


class Codebook(msgspec.Struct, frozen=True, kw_only=True):
    """How values are looked up as vectors.

    outputs, inputs   that a vector covers
    bits              of an index
    books             codebooks: whose vectors are added (AQLM), or that `run` inputs have (VPTQ)
    residual_bits     of an index of a second codebook, whose vectors are added; 0: none
    run               inputs of a codebook; 0: all
    outliers          inputs before these, with a codebook of their own for `outlier_outputs`
    num_outputs       of the weight; -1: whole vectors
    tile              outputs whose indices begin words of a row (HIGGS)
    rotated           inputs that were rotated together; 0: none
    """

    outputs: int
    inputs: int
    bits: int
    books: int = 1
    residual_bits: int = 0
    run: int = 0
    outliers: int = 0
    outlier_outputs: int = 0
    num_outputs: int = -1
    tile: int = 0
    rotated: int = 0


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights of some modules are stored.

    arrangement  a row of `ARRANGEMENTS` in quantized_tensors.py: which tensors, and how they lie
    bits         of a value
    group        (outputs, inputs) that share a scale; 0: all of them; None: as the scales' shape
                 says
    signed       integers are stored with an offset, and the zero point is 0 unless it is stored
    ordered      inputs belong to groups by an index (act-order), not by their place
    symmetric    stored zero points are all the middle of the range
    zero_offset  what is added to a stored zero point
    activations  how inputs are to be quantized; None: they stay as they are
    codebook     how vectors of values are looked up; None: values are numbers
    sections     of the outputs, of equal size, each with groups of its own from its first output on
    size         of the weight (outputs, inputs), one of them where its tensors do not say it;
                 0: they do
    largest      what stands for the largest magnitude of the weight, where that is stored; 0: it
                 is not
    divisor      of the second vectors that are added (QuIP#); 0: there are none
    """

    arrangement: str
    bits: int
    group: tuple[int, int] | None = None
    signed: bool = True
    ordered: bool = False
    symmetric: bool = False
    zero_offset: int = 0
    activations: Activations | None = None
    codebook: Codebook | None = None
    sections: int = 1
    size: tuple[int, int] = (0, 0)
    largest: int = 0
    divisor: float = 0.0


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Modules, and how their weights are stored. A target is a class of layers ("Linear": every
    one), the name of a module, or "re:" and a regular expression that a name begins with."""

    targets: tuple[str, ...]
    numbers: Numbers | None


class StoredQuantization(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's format. The first rule that a module's name fits holds for it; without any
    all is plain, and numbers are only to be made of it. `sparse`: the
    arrangement of weights whose zeros are left out, quantized or not; "": there are none. `merged`:
    the last name of a module that holds several side by side -> theirs, and the outputs of each."""

    method: str
    rules: tuple[Rule, ...]
    sparse: str = ""
    merged: dict[str, tuple[tuple[str, int], ...]] = {}

    def of(self, module: str) -> Numbers | None:
        """How a module's weight is stored if it is quantized; None: plain by the config."""
        for rule in self.rules:
            if any(_fits(target, module) for target in rule.targets):
                return rule.numbers
        return None


EVERY = "Linear"
"""The target that all modules fit."""


def _fits(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == EVERY or module == target or module.endswith(f".{target}")


def everything(method: str, numbers: Numbers, plain: tuple[str, ...]) -> StoredQuantization:
    """All modules but the plain ones alike."""
    rules = (Rule(targets=plain, numbers=None), Rule(targets=(EVERY,), numbers=numbers))
    return StoredQuantization(method=method, rules=rules)


def plain_modules(config: ConfigReader, *further: str) -> tuple[str, ...]:
    """The modules that stay plain, under the names that formats give to the list. A name stands for
    all below it; "*" for any characters."""
    names: list[str] = []
    for key in (
        "modules_to_not_convert",
        "ignored_layers",
        "exclude_modules",
        "ignore",
        "llm_int8_skip_modules",
        *further,
    ):
        names += config.list(key, (), of=str)
    return tuple(f"re:{module_pattern(name)}" for name in names)


def module_pattern(name: str) -> str:
    """A regular expression of what begins with the module and all below it; "*" stands for any
    characters."""
    return f"(.*\\.)?{re.escape(name).replace(chr(92) + '*', '.*')}(\\.|$)"


def bits_of(
    config: ConfigReader,
    known: tuple[int, ...],
    default: int | None = None,
    aliases: tuple[str, ...] = (),
) -> int:
    """The key `bits`, one of `known`."""
    bits = config.int("bits", aliases=aliases) if default is None else config.int("bits", default)
    if bits not in known:
        raise config.wrong("bits", " or ".join(str(one) for one in known))
    return bits

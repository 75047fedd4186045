"""`quantization_config` of AMD's Quark."""

from __future__ import annotations

import re

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import (
    EVERY,
    Numbers,
    Rule,
    StoredQuantization,
    plain_modules,
)
from headrace.base.config.quantization_activations import quark_activations

_QUARK = {
    ("int8", "per_tensor"): Numbers(arrangement="scaled", bits=8, group=(0, 0)),
    ("int8", "per_channel"): Numbers(arrangement="scaled", bits=8, group=(1, 0)),
    ("fp8_e4m3", "per_tensor"): Numbers(arrangement="scaled", bits=8, group=(0, 0)),
    ("fp8_e4m3", "per_channel"): Numbers(arrangement="scaled", bits=8, group=(1, 0)),
    ("fp6_e2m3", "per_group"): Numbers(arrangement="mxfp6-quark", bits=6, group=(1, 32)),
    ("fp6_e3m2", "per_group"): Numbers(arrangement="mxfp6-quark-e3m2", bits=6, group=(1, 32)),
    ("fp4", "per_group"): Numbers(arrangement="mxfp4-quark", bits=4, group=(1, 32)),
    ("uint4", "per_group"): Numbers(
        arrangement="quark-uint4", bits=4, group=(1, 128), signed=False
    ),
    ("int4", "per_group"): Numbers(arrangement="quark-int4", bits=4, group=(1, 128)),
}


def quark(config: ConfigReader) -> StoredQuantization:
    """AMD's Quark: e4m3 and int8 with a scale per tensor or output, MXFP4, and integers of 4 bits
    in groups; by module where `layer_quant_config` says so, with "*" for any characters."""
    whole = config.section("global_quant_config")
    if whole is None:
        raise config.wrong("global_quant_config", "a section with `weight`")
    if config.raw.get("layer_type_quant_config"):
        raise config.wrong("layer_type_quant_config", "empty (layers are told apart by name)")
    export = config.section("export")
    if export is not None:
        export.choice("weight_format", ("real_quantized",), "real_quantized")
        export.choice("pack_method", ("reorder",), "reorder")
    layers = config.section("layer_quant_config")
    rules = [Rule(targets=plain_modules(config, "exclude"), numbers=None)]
    for key in layers.raw if layers is not None else ():
        assert layers is not None
        pattern = f"re:{re.escape(key).replace(chr(92) + '*', '.*')}$"
        rules.append(Rule(targets=(pattern,), numbers=_quark_numbers(layers.section(key))))
    rules.append(Rule(targets=(EVERY,), numbers=_quark_numbers(whole)))
    return StoredQuantization(method="quark", rules=tuple(rules))


def _quark_numbers(entry: ConfigReader | None) -> Numbers | None:
    if entry is not None and isinstance(entry.raw.get("weight"), list):
        raise entry.wrong("weight", "one section (weights that are quantized twice are not read)")
    weight = None if entry is None else entry.section("weight")
    if weight is None:
        return None
    dtype = weight.choice("dtype", dict.fromkeys(dtype for dtype, _ in _QUARK))
    schemes = tuple(scheme for kind, scheme in _QUARK if kind == dtype)
    if dtype in ("fp4", "fp6_e2m3", "fp6_e3m2"):
        if weight.int("group_size", 32) != 32:
            raise weight.wrong("group_size", "32")
        weight.choice("scale_format", ("e8m0",), "e8m0")
    numbers = _QUARK[dtype, weight.choice("qscheme", schemes)]
    if numbers.arrangement.startswith("quark"):
        if weight.int("ch_axis", -1) not in (-1, 1):
            raise weight.wrong("ch_axis", "-1 (groups of inputs)")
        numbers = msgspec.structs.replace(
            numbers,
            group=(1, weight.int("group_size", ge=1)),
            symmetric=weight.bool("symmetric", False) if "symmetric" in weight else False,
        )
    assert entry is not None
    return msgspec.structs.replace(numbers, activations=quark_activations(entry))

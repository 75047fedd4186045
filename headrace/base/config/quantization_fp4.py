"""`quantization_config` of weights in e2m1: gpt-oss's MXFP4, and Four Over Six."""

from __future__ import annotations

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import (
    EVERY,
    Numbers,
    Rule,
    StoredQuantization,
    everything,
    plain_modules,
)
from headrace.base.config.quantization_activations import (
    NVFP4_GROUPS,
    Activations,
)


def mxfp4(config: ConfigReader) -> StoredQuantization:
    """gpt-oss: e2m1 numbers, a power of two for 32 inputs, experts only."""
    return everything(
        "mxfp4", Numbers(arrangement="mxfp4-blocks", bits=4, group=(1, 32)), plain_modules(config)
    )


def fouroversix(config: ConfigReader) -> StoredQuantization:
    """Four Over Six (Cook et al. 2025): NVFP4 whose groups end at 4 or at 6, or MXFP4; modules that
    differ (`module_config_overrides`). Master weights are the floats that they are."""
    if config.bool("keep_master_weights", False):
        return StoredQuantization(method="fouroversix", rules=())
    rules = [Rule(targets=plain_modules(config), numbers=None)]
    overrides = config.section("module_config_overrides")
    for name in overrides.raw if overrides is not None else ():
        assert overrides is not None
        numbers = _fouroversix_numbers(overrides.required_section(name))
        rules.append(Rule(targets=(name,), numbers=numbers))
    rules.append(Rule(targets=(EVERY,), numbers=_fouroversix_numbers(config)))
    return StoredQuantization(method="fouroversix", rules=tuple(rules))


def _fouroversix_numbers(config: ConfigReader) -> Numbers:
    dtype = config.choice("dtype", _FOUR_OVER_SIX, "nvfp4")
    dtype = config.choice("weight_dtype", _FOUR_OVER_SIX, dtype)
    rule = config.choice("scale_rule", _LARGEST, "mse")
    rule = config.choice("weight_scale_rule", _LARGEST, rule)
    arrangement, group, activations = _FOUR_OVER_SIX[dtype]
    return Numbers(
        arrangement=arrangement,
        bits=4,
        group=(1, group),
        largest=_LARGEST[rule],
        activations=activations,
    )


_FOUR_OVER_SIX = {
    "nvfp4": ("fouroversix-nvfp4", 16, NVFP4_GROUPS),
    "mxfp4": (
        "fouroversix-mxfp4",
        32,
        Activations(bits=4, floating=True, shared="group", group=32),
    ),
}
"""`dtype` -> arrangement, inputs that share a scale, what inputs become."""
_LARGEST = {
    "mse": 6 * 256,
    "mae": 6 * 256,
    "abs_max": 6 * 256,
    "static_6": 6 * 448,
    "static_4": 4 * 448,
}
"""`scale_rule` -> what a value times its scale is at most: the largest magnitude of the weight
stands for it."""

"""`quantization_config` of compressed-tensors: groups of modules, each with numbers of its own;
sparse weights; rotations that are in the weights already."""

from __future__ import annotations

import re

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import EVERY, Numbers, Rule, StoredQuantization
from headrace.base.config.quantization_activations import compressed_activations


def compressed(config: ConfigReader) -> StoredQuantization:
    """compressed-tensors: the config as rules."""
    _check_transforms(config.section("transform_config"))
    sparsity = config.section("sparsity_config")
    sparse = "dense" if sparsity is None else sparsity.choice("format", _SPARSE, "dense")
    whole = config.str("format", "dense")
    config.choice("quantization_status", ("compressed", "frozen"), "compressed")
    groups = config.section("config_groups")
    rules = []
    for name in groups.raw if groups is not None else ():
        assert groups is not None
        group = groups.section(name)
        weights = group.section("weights") if group is not None else None
        if group is None or weights is None:
            continue
        targets = group.list("targets", of=str)
        numbers = _compressed_numbers(group.str("format", whole), group, weights)
        rules.append(Rule(targets=targets, numbers=numbers))
    plain = Rule(targets=config.list("ignore", (), of=str), numbers=None)
    # A module that is named stands before the class that it belongs to.
    rules.sort(key=lambda rule: EVERY in rule.targets)
    return StoredQuantization(
        method="compressed-tensors", rules=(plain, *rules), sparse=_SPARSE[sparse]
    )


_SPARSE = {"dense": "", "sparse-24-bitmask": "sparse-24", "sparse-bitmask": "sparse"}
_OFFLINE = ("weight_input", "weight_output")


def _check_transforms(config: ConfigReader | None) -> None:
    """Rotations of weights lie in what is stored; those of activations are not computed here."""
    groups = None if config is None else config.section("config_groups")
    for name in groups.raw if groups is not None else ():
        assert groups is not None
        group = groups.section(name)
        applied = group.raw.get("apply") if group is not None else None
        for entry in applied if isinstance(applied, list) else ():
            place = ConfigReader(entry, f"{groups.where}: {name}: apply")
            if place.str("location") not in _OFFLINE:
                known = f"{' or '.join(_OFFLINE)} (activations are not rotated)"
                raise place.wrong("location", known)


_COMPRESSED = {
    "pack-quantized": "packed",
    "int-quantized": "scaled",
    "float-quantized": "scaled",
    "naive-quantized": "scaled",
    "nvfp4-pack-quantized": "nvfp4-packed",
    "mxfp4-pack-quantized": "mxfp4-packed",
    "mxfp6-pack-quantized": "mxfp6-packed",
    "mxfp8-quantized": "scaled",
    "marlin-24": "marlin-24",
    "mixed-precision": "",
}


def _compressed_numbers(format: str, group: ConfigReader, weights: ConfigReader) -> Numbers:
    if _COMPRESSED.get(format, "") == "":
        raise group.wrong("format", " or ".join(key for key, kind in _COMPRESSED.items() if kind))
    strategy = weights.choice(
        "strategy", ("tensor", "channel", "group", "block", "tensor_group"), "tensor"
    )
    size = weights.int("group_size", 0, ge=-1) or 0
    if weights.bool("dynamic", False):
        raise weights.wrong("dynamic", "false (scales of weights are stored)")
    block = _block(weights)
    shared: dict[str, tuple[int, int]] = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, max(size, 0)),
        "tensor_group": (1, max(size, 0)),
        "block": (block[0], block[1]) if len(block) == 2 else (0, 0),
    }
    if strategy == "block" and len(block) != 2:
        raise weights.wrong("block_structure", "two sizes, of outputs and of inputs")
    bits = weights.int("num_bits", 8, ge=1, le=8)
    if weights.choice("type", ("int", "float"), "int") == "float" and bits not in (4, 6, 8):
        raise weights.wrong("num_bits", "4, 6 or 8 for floats")
    if format == "marlin-24":
        _check_marlin(weights, strategy, bits)
    return Numbers(
        arrangement=_COMPRESSED[format],
        bits=bits,
        group=shared[strategy],
        ordered=_is_ordered(weights),
        activations=compressed_activations(group),
    )


def _check_marlin(weights: ConfigReader, strategy: str, bits: int) -> None:
    """Marlin's sparse tiles know symmetric integers of 4 and 8 bits."""
    if bits not in (4, 8):
        raise weights.wrong("num_bits", "4 or 8, in the format marlin-24")
    if strategy not in ("group", "channel"):
        raise weights.wrong("strategy", "group or channel, in the format marlin-24")
    if not weights.bool("symmetric", True):
        raise weights.wrong("symmetric", "true, in the format marlin-24")


def _block(weights: ConfigReader) -> tuple[int, ...]:
    """Two sizes, as older versions write them in one word too ("128x128")."""
    written = weights.raw.get("block_structure")
    if isinstance(written, str) and re.fullmatch(r"\d+x\d+", written, re.ASCII):
        return tuple(int(size) for size in written.split("x"))
    return weights.list("block_structure", (), of=int)


def _is_ordered(weights: ConfigReader) -> bool:
    """Whether inputs belong to groups by an index: `actorder` may name ways in which the order was
    that of quantization alone."""
    written = weights.raw.get("actorder")
    if isinstance(written, bool) or written is None:
        return bool(written)
    return weights.choice("actorder", ("group", "weight", "static", "dynamic")) in (
        "group",
        "dynamic",
    )

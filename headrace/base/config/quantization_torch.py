"""`quantization_config` of torchao and HQQ, as transformers writes them beside safetensors."""

from __future__ import annotations

import re

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import (
    EVERY,
    Numbers,
    Rule,
    StoredQuantization,
    plain_modules,
)
from headrace.base.config.quantization_activations import Activations
from headrace.base.errors import CheckpointError

_TORCHAO = {
    "Int8WeightOnlyConfig": "PerRow",
    "Int8DynamicActivationInt8WeightConfig": "PerRow",
    "Int8StaticActivationInt8WeightConfig": "PerRow",
    "IntxWeightOnlyConfig": "PerAxis",
    "Int8DynamicActivationIntxWeightConfig": "PerGroup",
    "Float8WeightOnlyConfig": "PerRow",
    "Float8DynamicActivationFloat8WeightConfig": "PerTensor",
    "Float8StaticActivationFloat8WeightConfig": "PerTensor",
    "Int4WeightOnlyConfig": "PerGroup",
}
"""The type of configuration -> what shares a scale unless it says so."""
_GRANULARITIES = ("PerRow", "PerAxis", "PerTensor", "PerGroup", "PerBlock")


def torchao(config: ConfigReader) -> StoredQuantization:
    """torchao 0.15 and later: one configuration for all linear modules, or by name (`FqnToConfig`:
    module, "re:" and a regular expression of the whole name, or "_default")."""
    kinds = config.section("quant_type")
    default = kinds.section("default") if kinds is not None else None
    if default is None:
        raise config.wrong("quant_type", "a section `default` (older ones: save it again)")
    plain = Rule(targets=plain_modules(config), numbers=None)
    if default.str("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        rules = (Rule(targets=(EVERY,), numbers=_torchao_numbers(default)),)
        return StoredQuantization(method="torchao", rules=(plain, *rules))
    data = default.section("_data")
    modules = data.section("fqn_to_config", aliases=("module_fqn_to_config",)) if data else None
    named, rest = [], Rule(targets=(EVERY,), numbers=None)
    for name in modules.raw if modules is not None else ():
        assert modules is not None
        entry = modules.section(name) if name in modules else None
        numbers = None if entry is None else _torchao_numbers(entry)
        if name == "_default":
            rest = Rule(targets=(EVERY,), numbers=numbers)
            continue
        module = name.removesuffix(".weight")
        pattern = name[3:] if name.startswith("re:") else re.escape(module)
        target = f"re:(?:{pattern})$"
        named.append(Rule(targets=(target,), numbers=numbers))
    return StoredQuantization(method="torchao", rules=(plain, *named, rest))


def _torchao_numbers(config: ConfigReader) -> Numbers:
    kind = config.choice("_type", _TORCHAO)
    if kind.startswith("Int") and config.int("_version", 2) < 2:
        raise config.wrong("_version", "2 (version 1 is not saved as safetensors)")
    data = config.section("_data") or ConfigReader({}, config.where)
    group = _torchao_group(data, kind)
    if kind.startswith("Float8"):
        _named(data, "weight_dtype", ("float8_e4m3fn",))
        return Numbers(
            arrangement="torchao-float8", bits=8, group=group, activations=_torchao_inputs(kind)
        )
    if kind == "Int4WeightOnlyConfig":
        packing = _named(data, "int4_packing_format", ("plain", "tile_packed_to_4d"))
        if packing == "tile_packed_to_4d":
            return Numbers(arrangement="torchao-tiles", bits=4, group=group, signed=False)
        return Numbers(arrangement="torchao-int4", bits=4, group=group)
    _named(data, "intx_packing_format", ("unpacked_to_int8",))
    dtype = _named(data, "weight_dtype", ("int8", *(f"int{bits}" for bits in range(1, 8))))
    mapping = _named(data, "weight_mapping_type", _MAPPINGS, default="symmetric")
    mapping = _named(data, "mapping_type", _MAPPINGS, default=mapping)
    return Numbers(
        arrangement="torchao-int8",
        bits=4 if dtype == "int4" else 8,
        group=group,
        symmetric=mapping != "asymmetric",
        activations=_torchao_inputs(kind),
    )


def _torchao_inputs(kind: str) -> Activations | None:
    """What the type of configuration says; static scales are one for a tensor."""
    if "Activation" not in kind:
        return None
    static = "StaticActivation" in kind
    shared = "tensor" if static else "token"
    return Activations(
        bits=8, floating=kind.startswith("Float8"), shared=shared, dynamic=not static
    )


_MAPPINGS = ("symmetric", "symmetric_no_clipping_err", "asymmetric")


def _named(
    config: ConfigReader, key: str, known: tuple[str, ...], default: str | None = None
) -> str:
    """A value that torchao writes as {"_type", "_data"}, in capitals or not; the first of `known`
    is the default."""
    entry = config.section(key) if isinstance(config.raw.get(key), dict) else None
    value = config.str(key, default or known[0]) if entry is None else entry.str("_data")
    if value.lower() not in known:
        raise CheckpointError(
            f"{config.where}: {key} is {value!r}; it must be {' or '.join(known)}", field=key
        )
    return value.lower()


def _torchao_group(config: ConfigReader, kind: str) -> tuple[int, int]:
    entry = config.section("granularity", aliases=("weight_granularity",))
    shared = _TORCHAO[kind] if entry is None else entry.choice("_type", _GRANULARITIES)
    data = entry.section("_data") if entry is not None else None
    owner = data if data is not None else config
    if shared == "PerTensor":
        return (0, 0)
    if shared == "PerGroup":
        return (1, owner.int("group_size", 32 if kind.startswith("Int8") else 128, ge=1))
    if shared == "PerBlock":
        block = owner.list("block_size", of=int, length=2)
        return (block[0], block[1])
    return (1, config.int("group_size", 0, ge=0))


def hqq(config: ConfigReader) -> StoredQuantization:
    """HQQ (Badri and Shaji 2023): integers with scales and float zero points of groups along one
    axis; one configuration, or one for each kind of linear module ("self_attn.q_proj")."""
    whole = config.section("quant_config")
    if whole is None:
        raise config.wrong("quant_config", "a section")
    plain = Rule(targets=plain_modules(config, "skip_modules"), numbers=None)
    if "weight_quant_params" in whole:
        rules = [Rule(targets=(EVERY,), numbers=_hqq_numbers(whole))]
        return StoredQuantization(method="hqq", rules=(plain, *rules))
    rules = []
    for tag in whole.raw:
        entry = whole.section(tag) if tag in whole else None
        numbers = None if entry is None else _hqq_numbers(entry)
        rules.append(Rule(targets=(tag,), numbers=numbers))
    return StoredQuantization(method="hqq", rules=(plain, *rules))


def _hqq_numbers(config: ConfigReader) -> Numbers:
    for key in ("scale_quant_params", "zero_quant_params"):
        if key in config:
            raise config.wrong(key, "null (scales and zero points that are floats)")
    weights = config.section("weight_quant_params")
    if weights is None:
        raise config.wrong("weight_quant_params", "a section")
    if weights.bool("view_as_float", False):
        raise weights.wrong("view_as_float", "false")
    bits = weights.int("nbits")
    if bits not in (1, 2, 3, 4, 8):
        raise weights.wrong("nbits", "1, 2, 3, 4 or 8")
    axis = weights.int("axis", 0, ge=0, le=1)
    size = weights.int("group_size", 0, ge=1)
    if axis == 0 and size == 0:
        raise weights.wrong("group_size", "a size, along axis 0")
    return Numbers(
        arrangement="hqq" if axis == 1 else "hqq-axis0", bits=bits, group=(1, size), signed=False
    )

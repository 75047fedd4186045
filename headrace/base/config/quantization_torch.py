"""`quantization_config` of what packages of PyTorch write beside safetensors: torchao, HQQ, SINQ,
Quanto, and Gemma's integers in transformers."""

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
    """Scales and zero points lie in safetensors as floats, whatever `scale_quant_params` asked for:
    HQQ 0.2 ignores it, and its earlier versions refused to write quantized ones there."""
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


def sinq(config: ConfigReader) -> StoredQuantization:
    """SINQ (Mueller et al. 2025): integers, or levels of normal values, with a scale for a group of
    inputs and one for each input; or in square tiles with scales of their rows and columns
    (`tiling_mode` 2D), of which `hidden_size` says how many lie side by side."""
    method = config.choice("method", _SINQ_METHODS, "sinq")
    levels = next((one for one in _SINQ_LEVELS if one in method), "")
    bits = config.int("nbits", 4)
    if bits not in (1, 2, 3, 4, 5, 6, 8):
        raise config.wrong("nbits", "1, 2, 3, 4, 5, 6 or 8")
    if levels and bits != _SINQ_LEVELS[levels]:
        raise config.wrong("nbits", f"{_SINQ_LEVELS[levels]}, of {levels}")
    plain = Rule(targets=plain_modules(config), numbers=None)
    arrangement = "sinq" if config.choice("tiling_mode", ("1D", "2D"), "1D") == "1D" else "sinq-2d"
    arrangement += levels and f"-{levels}"
    hidden = config.int("hidden_size", 0, ge=1)
    if arrangement.startswith("sinq-2d") and not hidden:
        raise config.wrong("tiling_mode", "1D, where hidden_size is not known")
    rules = [plain]
    for target, size in ((f"re:.*{_BACK}", (hidden, 0)), (EVERY, (0, hidden))):
        numbers = Numbers(arrangement=arrangement, bits=bits, signed=False, size=size)
        rules.append(Rule(targets=(target,), numbers=numbers))
    return StoredQuantization(method="sinq", rules=tuple(rules))


_SINQ_LEVELS = {"nf4": 4, "nf3": 3}
"""Levels, which a method names, and their bits."""
_SINQ_PLAIN = ("sinq", "asinq", "dual", "sinq_awq_l1")
_SINQ_METHODS = tuple(
    f"{method}{levels}{auxiliary}"
    for method in _SINQ_PLAIN
    for levels in ("", "_nf4", "_nf3")
    for auxiliary in ("", "_quantAux")
)


def quanto(config: ConfigReader) -> StoredQuantization:
    """Quanto (optimum-quanto): int8 and e4m3 with a scale for each output, integers of 2 and 4 bits
    in groups of inputs, whose tensors say neither outputs nor inputs: one of them is `hidden_size`.
    Its own file names each module (`modules`); transformers has one configuration for all."""
    modules = config.section("modules")
    hidden = config.int("hidden_size", 0, ge=1)
    if modules is None:
        inner = _quanto_numbers(config, (0, hidden))
        outer = _quanto_numbers(config, (hidden, 0))
        plain = Rule(targets=plain_modules(config), numbers=None)
        back = Rule(targets=(f"re:.*{_BACK}",), numbers=outer)
        rules = (plain, back, Rule(targets=(EVERY,), numbers=inner))
        return StoredQuantization(method="quanto", rules=rules)
    named = []
    for name in modules.raw:
        known = (hidden, 0) if re.search(_BACK, name) else (0, hidden)
        numbers = _quanto_numbers(modules.required_section(name), known)
        named.append(Rule(targets=(f"re:{re.escape(name)}$",), numbers=numbers))
    return StoredQuantization(method="quanto", rules=tuple(named))


_BACK = r"(?:^|\.)(?:o_proj|out_proj|c_proj|down_proj|w2|wo|fc2|fc_out|dense|dense_4h_to_h)$"
"""Names of modules whose outputs, not their inputs, are the hidden size."""


def _quanto_numbers(config: ConfigReader, known: tuple[int, int]) -> Numbers | None:
    weights = config.choice("weights", (*_QUANTO, "none"), "int8")
    if weights == "none":
        return None
    asked = config.choice("activations", (*_QUANTO_ACTIVATIONS, "none"), "none")
    activations = _QUANTO_ACTIVATIONS.get(asked)
    bits = _QUANTO[weights]
    if bits == 8:
        kind = "quanto-e5m2" if weights.endswith("e5m2") else "quanto"
        return Numbers(arrangement=kind, bits=8, group=(1, 0), activations=activations)
    if not any(known):
        raise config.wrong("weights", "int8 or float8, where hidden_size is not known")
    return Numbers(
        arrangement="quanto-packed", bits=bits, signed=False, size=known, activations=activations
    )


_QUANTO = {
    **dict.fromkeys(("int8", "qint8", "float8", "qfloat8", "qfloat8_e4m3fn"), 8),
    **dict.fromkeys(("float8_e5m2", "qfloat8_e5m2"), 8),
    **{"int4": 4, "qint4": 4, "int2": 2, "qint2": 2},
}
"""`weights` -> bits."""
_INT8_STATIC = Activations(bits=8, floating=False, shared="tensor", dynamic=False)
_FP8_STATIC = Activations(bits=8, floating=True, shared="tensor", dynamic=False)
_QUANTO_ACTIVATIONS = {
    **dict.fromkeys(("int8", "qint8"), _INT8_STATIC),
    **dict.fromkeys(("float8", "qfloat8", "qfloat8_e4m3fn", "qfloat8_e5m2"), _FP8_STATIC),
}


def row_integers(config: ConfigReader) -> StoredQuantization:
    """transformers' integers of 2, 4 and 8 bits with a scale for each output (Gemma), by regular
    expressions found anywhere in a module's name; of tables of tokens too."""
    rules = [Rule(targets=plain_modules(config), numbers=None)]
    modules = config.section("module_quant_configs")
    entries = []
    if modules is not None:
        entries = [(name, modules.required_section(name)) for name in modules.raw]
    entries.append(("", config))
    default = config.int("num_bits", 4)
    for pattern, entry in entries:
        bits = entry.int("num_bits", default)
        if bits not in (2, 4, 8):
            raise entry.wrong("num_bits", "2, 4 or 8")
        here = f"(?=.*(?:{pattern}))" if pattern else ""
        if config.bool("quantize_embeddings", False):
            rules.append(_row_rule(f"re:{here}.*embed_tokens[^.]*$", "row-integers-table", bits))
        rules.append(_row_rule(f"re:{here}" if here else EVERY, "row-integers", bits))
    return StoredQuantization(method="row integers", rules=tuple(rules))


def _row_rule(target: str, arrangement: str, bits: int) -> Rule:
    numbers = Numbers(arrangement=arrangement, bits=bits, group=(1, 0), activations=_INT8_STATIC)
    return Rule(targets=(target,), numbers=numbers)

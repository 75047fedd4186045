"""`quantization_config` of config.json, read key by key, for each format of the table.

A variant that is not known is refused by its key, value and the known values. compressed-tensors:
quantization_compressed.py; floats of 4 and 8 bits: quantization_fp4.py, quantization_fp8.py and
quantization_round.py; what packages of PyTorch write: quantization_torch.py; MLX:
quantization_mlx.py; AMD's and SGLang's: quantization_quark.py, quantization_sglang.py; codebooks:
quantization_vectors.py and, where no method is named, quantization_quip.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from headrace.base import extensions
from headrace.base.config.foreign_quantization import read_foreign
from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import (
    EVERY,
    Numbers,
    Rule,
    StoredQuantization,
    bits_of,
    everything,
    plain_modules,
)
from headrace.base.config.quantization_activations import (
    E4M3_TENSOR,
    E4M3_TOKENS,
    INT8_TENSOR,
    INT8_TOKENS,
    MXFP8_GROUPS,
    NVFP4_GROUPS,
)
from headrace.base.config.quantization_compressed import compressed
from headrace.base.config.quantization_fp4 import fouroversix, mxfp4
from headrace.base.config.quantization_fp8 import fbgemm, fp8, mxfp8
from headrace.base.config.quantization_mlx import mlx
from headrace.base.config.quantization_quark import quark
from headrace.base.config.quantization_quip import quip
from headrace.base.config.quantization_round import floats, is_floating
from headrace.base.config.quantization_sglang import (
    blockwise_int8,
    w4afp8,
    w8a8_fp8,
    w8a8_int8,
)
from headrace.base.config.quantization_torch import hqq, quanto, row_integers, sinq, torchao
from headrace.base.config.quantization_vectors import aqlm, exl2, exl3, fp_quant, higgs, spqr, vptq


def stored_quantization(raw: Mapping[str, Any], where: str) -> StoredQuantization | None:
    """What config.json says of quantized weights; None if it says nothing. CheckpointError names a
    method or variant that cannot be read."""
    for reader in (ConfigReader(raw, where), ConfigReader(raw, where).section("text_config")):
        if reader is None:
            continue
        if (params := reader.section("quip_params")) is not None:
            return quip(reader, params)
        for key in ("quantization_config", "compression_config"):
            config = reader.section(key)
            if config is not None:
                return _read(config, reader.raw)
    return None


def _read(config: ConfigReader, model: Mapping[str, Any]) -> StoredQuantization:
    foreign = extensions.allowed(extensions.QUANTIZATIONS)
    known = (*METHODS, *(name for name in foreign if name not in METHODS))
    method = config.choice("quant_method", known, aliases=("quantization_method",))
    if method not in METHODS:
        return read_foreign(method, config)
    if method in _SIZED and "hidden_size" in model:
        sized = {"hidden_size": model["hidden_size"], **config.raw}
        config = ConfigReader(sized, config.where)
    return METHODS[method](config)


_SIZED = ("quanto", "sinq")
"""Methods whose tensors do not always say how many outputs and inputs there are."""


def _gptq(config: ConfigReader) -> StoredQuantization:
    """GPTQ (Frantar et al. 2022): integers with a scale and zero point for each output and group of
    inputs. Version 1 stores zero points less one; Marlin's tiles have none. BitBLAS's rows have
    them as they are, and no order of inputs."""
    config.choice("pack_dtype", ("int32",), "int32")
    version = config.choice("checkpoint_format", _GPTQ, "gptq")
    if config.bool("is_marlin_format", False) or config.raw.get("quant_method") == "marlin":
        version = "marlin"
    if config.bool("is_bitblas_format", False) or config.raw.get("quant_method") == "bitblas":
        version = "bitblas"
    tiles = version.startswith("marlin")
    known = _GPTQ_BITS.get(version, (2, 3, 4, 8))
    bits, size = bits_of(config, known), config.int("group_size", ge=-1)
    ordered = config.bool("desc_act", False)
    if (tiles or version == "bitblas") and ordered and size != -1:
        raise config.wrong("desc_act", f"false, in the layout {version}")
    numbers = Numbers(
        arrangement=_GPTQ[version],
        bits=bits,
        group=(1, 0 if size == -1 else size),
        signed=tiles,
        ordered=ordered and version in ("gptq", "gptq_v2"),
        symmetric=config.bool("sym", tiles),
        zero_offset=1 if version == "gptq" else 0,
    )
    rules = _dynamic(config, numbers, known)
    return StoredQuantization(
        method="gptq", rules=(*rules, Rule(targets=(EVERY,), numbers=numbers))
    )


_GPTQ = {
    "gptq": "gptq",
    "gptq_v2": "gptq",
    "marlin": "gptq-marlin",
    "marlin_24": "gptq-marlin-24",
    "bitblas": "bitblas",
}
"""`checkpoint_format` -> arrangement."""
_GPTQ_BITS = {"marlin": (4,), "marlin_24": (4, 8), "bitblas": (2, 4, 8)}


def _dynamic(config: ConfigReader, numbers: Numbers, known: tuple[int, ...]) -> tuple[Rule, ...]:
    """`dynamic`: regular expressions of modules that differ ("+:", the default) or are plain
    ("-:")."""
    section = config.section("dynamic")
    rules = []
    for key in section.raw if section is not None else ():
        assert section is not None
        sign, _, pattern = key.rpartition(":") if key[:2] in ("+:", "-:") else ("+", ":", key)
        entry = section.section(key)
        if sign == "-" or entry is None:
            rules.append(Rule(targets=(f"re:{pattern}",), numbers=None))
            continue
        size = entry.int("group_size", (numbers.group or (1, 0))[1] or -1, ge=-1)
        changed = msgspec.structs.replace(
            numbers,
            bits=bits_of(entry, known, numbers.bits),
            group=(1, 0 if size == -1 else size),
        )
        rules.append(Rule(targets=(f"re:{pattern}",), numbers=changed))
    return tuple(rules)


def _awq(config: ConfigReader) -> StoredQuantization:
    """AWQ (Lin et al. 2023), 4 bits: eight outputs to a word (`gemm`), or as its kernels for one
    token (`gemv`, `gemv_fast`) or Marlin's take them."""
    version = config.str("version", "gemm").lower()
    if version not in _AWQ:
        raise config.wrong("version", " or ".join(_AWQ))
    size = config.int("group_size", aliases=("q_group_size",), ge=-1)
    marlin = version == "marlin"
    numbers = Numbers(
        arrangement=_AWQ[version],
        bits=bits_of(config, (4,), aliases=("w_bit",)),
        group=(1, 0 if size == -1 else size),
        signed=marlin,
        symmetric=marlin,
    )
    return everything("awq", numbers, plain_modules(config))


_AWQ = {
    "gemm": "awq",
    "gemv": "awq-gemv",
    "gemv_fast": "awq-gemv-fast",
    "marlin": "awq-marlin",
}
"""`version` -> arrangement."""


def _eetq(config: ConfigReader) -> StoredQuantization:
    """EETQ: int8 with a scale for each output."""
    config.choice("weights", ("int8",), "int8")
    numbers = Numbers(arrangement="eetq", bits=8, group=(1, 0))
    return everything("eetq", numbers, plain_modules(config))


def _auto_round(config: ConfigReader) -> StoredQuantization:
    """AutoRound (Cheng et al. 2023) writes what GPTQ or AWQ write, or floats. `extra_config`:
    modules, or regular expressions of them, that differ; of 16 bits and more they are plain."""
    if is_floating(config):
        rules = everything("auto-round", floats(config), plain_modules(config)).rules
        return StoredQuantization(method="auto-round", rules=(*_extra(config, None, ()), *rules))
    packing = config.str("packing_format", "auto_round:auto_gptq")
    kinds = {"gptq": _gptq, "awq": _awq}
    for name, read in kinds.items():
        if packing.endswith(name):
            stored = read(config)
            extra = _extra(
                config, stored.rules[-1].numbers, (4,) if name == "awq" else (2, 3, 4, 8)
            )
            return StoredQuantization(method="auto-round", rules=(*extra, *stored.rules))
    raise config.wrong("packing_format", "auto_round:auto_gptq or auto_round:auto_awq")


def _extra(config: ConfigReader, numbers: Numbers | None, known: tuple[int, ...]) -> Iterator[Rule]:
    """`numbers`: what integers are, where all are not floats."""
    section = config.section("extra_config")
    for key in section.raw if section is not None else ():
        assert section is not None
        entry, target = section.section(key), f"re:{key}" if set(key) & set("*^$|+") else key
        if entry is None:
            continue
        whole = ConfigReader({**config.raw, **entry.raw}, entry.where)
        if whole.int("bits", ge=1) >= 16:
            yield Rule(targets=(target,), numbers=None)
        elif numbers is None:
            yield Rule(targets=(target,), numbers=floats(whole))
        else:
            whole.choice("data_type", ("int",), "int")
            size = whole.int("group_size", -1, ge=-1)
            changed = msgspec.structs.replace(
                numbers,
                bits=bits_of(whole, known),
                group=(1, 0 if size == -1 else size),
                symmetric=entry.bool("sym", numbers.symmetric),
            )
            yield Rule(targets=(target,), numbers=changed)


def _modelopt(config: ConfigReader) -> StoredQuantization:
    """NVIDIA ModelOpt; its own file hf_quant_config.json has the same keys under
    `quantization`."""
    algorithm = config.choice("quant_algo", (*_MODELOPT, "MIXED_PRECISION"))
    plain = plain_modules(config)
    if algorithm != "MIXED_PRECISION":
        return everything("modelopt", _modelopt_numbers(config, algorithm), plain)
    layers = config.section("quantized_layers")
    rules = [Rule(targets=plain, numbers=None)]
    for name in layers.raw if layers is not None else ():
        assert layers is not None
        entry = layers.section(name)
        if entry is not None:
            numbers = _modelopt_numbers(entry, entry.choice("quant_algo", tuple(_MODELOPT)))
            rules.append(Rule(targets=(name,), numbers=numbers))
    return StoredQuantization(method="modelopt", rules=tuple(rules))


def _modelopt_numbers(entry: ConfigReader, algorithm: str) -> Numbers:
    """An algorithm's, with the group that the entry names: integers come in groups of any size."""
    numbers = _MODELOPT[algorithm]
    size = (numbers.group or (0, 0))[1]
    if numbers.arrangement == "modelopt-int4":
        size = entry.int("group_size", size, ge=1)
        return msgspec.structs.replace(numbers, group=(1, size))
    if size and entry.int("group_size", size, ge=0) not in (0, size):
        raise entry.wrong("group_size", f"{size}, of {algorithm}")
    return numbers


_MODELOPT = {
    "FP8": Numbers(arrangement="scaled", bits=8, activations=E4M3_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": Numbers(
        arrangement="scaled", bits=8, group=(1, 0), activations=E4M3_TOKENS
    ),
    "FP8_PB_WO": Numbers(arrangement="scaled", bits=8, group=(128, 128)),
    "W8A16": Numbers(arrangement="scaled", bits=8, group=(1, 0)),
    "W8A8_SQ_PER_CHANNEL": Numbers(
        arrangement="scaled", bits=8, group=(1, 0), activations=INT8_TENSOR
    ),
    "W4A8_MXFP4_FP8": Numbers(
        arrangement="mxfp4-quark", bits=4, group=(1, 32), activations=E4M3_TENSOR
    ),
    "W4A16_AWQ": Numbers(arrangement="modelopt-int4", bits=4, group=(1, 128)),
    "NVFP4_AWQ": Numbers(arrangement="nvfp4", bits=4, group=(1, 16), activations=NVFP4_GROUPS),
    "NVFP4": Numbers(arrangement="nvfp4", bits=4, group=(1, 16), activations=NVFP4_GROUPS),
    "MXFP8": Numbers(arrangement="scaled", bits=8, group=(1, 32), activations=MXFP8_GROUPS),
}


def _bitsandbytes(config: ConfigReader) -> StoredQuantization:
    """bitsandbytes: levels of 4 bits (nf4, fp4) in runs of values, or int8 with a scale for each
    output."""
    if config.bool("load_in_8bit", False, aliases=("_load_in_8bit",)):
        numbers = Numbers(arrangement="bnb-int8", bits=8, group=(1, 0), activations=INT8_TOKENS)
    elif config.bool("load_in_4bit", False, aliases=("_load_in_4bit",)):
        config.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        storage = config.choice("bnb_4bit_quant_storage", _BNB_STORAGE, "uint8")
        kind = "bnb-4bit" if storage == "uint8" else "bnb-4bit-floats"
        numbers = Numbers(arrangement=kind, bits=4)
    else:
        raise config.wrong("load_in_4bit", "true, or load_in_8bit true")
    return everything("bitsandbytes", numbers, plain_modules(config))


_BNB_STORAGE = ("uint8", "bfloat16", "float16", "float32")
"""What bytes are stored as; floats of several bytes, so that they are shared out among GPUs."""


def _deepspeed(config: ConfigReader) -> StoredQuantization:
    """DeepSpeed's floats of 6, 8 and 12 bits are made while loading: what is stored is plain."""
    bits_of(config, (4, 6, 8, 12), 8)
    return StoredQuantization(method="deepspeedfp", rules=())


def _metal(config: ConfigReader) -> StoredQuantization:
    """What transformers makes for Apple's GPUs: as MLX, under a name of its own."""
    size, bits = config.int("group_size", 64, ge=1), bits_of(config, (2, 4, 8), 4)
    numbers = Numbers(arrangement="metal", bits=bits, group=(1, size), signed=False)
    return everything("metal", numbers, plain_modules(config))


def _bitnet(config: ConfigReader) -> StoredQuantization:
    """BitNet b1.58: -1, 0 and 1 with one scale, which BitLinear divides by."""
    config.choice("quantization_mode", ("offline",), "offline")
    if config.bool("use_rms_norm", False):
        raise config.wrong("use_rms_norm", "false")
    kinds = {"autobitlinear": "ternary", "bitlinear": "ternary-inverse"}
    kind = kinds[config.choice("linear_class", kinds, "bitlinear")]
    numbers = Numbers(arrangement=kind, bits=2, group=(0, 0), activations=INT8_TOKENS)
    return everything("bitnet", numbers, plain_modules(config))


METHODS: dict[str, Callable[[ConfigReader], StoredQuantization]] = {
    "fp8": fp8,
    "mxfp8": mxfp8,
    "fbgemm_fp8": fbgemm,
    "gptq": _gptq,
    "marlin": _gptq,
    "bitblas": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "inc": _auto_round,
    "compressed-tensors": compressed,
    "blockwise_int8": blockwise_int8,
    "w8a8_int8": w8a8_int8,
    "w8a8_fp8": w8a8_fp8,
    "w4afp8": w4afp8,
    "modelopt": _modelopt,
    "modelopt_fp8": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "modelopt_mxfp8": _modelopt,
    "mxfp4": mxfp4,
    "fouroversix": fouroversix,
    "bitsandbytes": _bitsandbytes,
    "bitnet": _bitnet,
    "eetq": _eetq,
    "metal": _metal,
    "deepspeedfp": _deepspeed,
    "quark": quark,
    "torchao": torchao,
    "hqq": hqq,
    "quanto": quanto,
    "sinq": sinq,
    "gemma": row_integers,
    "mlx": mlx,
    "aqlm": aqlm,
    "vptq": vptq,
    "exl2": exl2,
    "exl3": exl3,
    "fp_quant": fp_quant,
    "spqr": spqr,
    "higgs": higgs,
}
"""`quant_method` -> its reader."""

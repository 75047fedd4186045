"""AutoRound's floats (Cheng et al. 2023): MXFP4, MXFP8 and NVFP4 as compressed-tensors names their
parts, and e4m3 with a scale per output or per tensor. Its integers are GPTQ's and AWQ's."""

from __future__ import annotations

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import Numbers, bits_of
from headrace.base.config.quantization_activations import (
    E4M3_TENSOR,
    E4M3_TOKENS,
    MXFP8_GROUPS,
    NVFP4_GROUPS,
    Activations,
)

_MXFP4_GROUPS = Activations(bits=4, floating=True, shared="group", group=32)


def is_floating(config: ConfigReader) -> bool:
    return config.choice("data_type", ("int", *_FLOATS), "int") != "int"


def floats(config: ConfigReader) -> Numbers:
    """Of a checkpoint, or of a module that differs from it."""
    kind = _FLOATS[config.choice("data_type", tuple(_FLOATS))]
    packing = _PACKINGS[kind]
    if not config.str("packing_format", packing).startswith(packing):
        raise config.wrong("packing_format", f"{packing}...")
    if not config.bool("sym", True):
        raise config.wrong("sym", "true, of floats")
    if kind == "e4m3":
        return _e4m3(config)
    bits = bits_of(config, (4, 8) if kind == "mx" else (4,))
    size = 32 if kind == "mx" else 16
    if config.int("group_size", size) != size:
        raise config.wrong("group_size", f"{size}, of {config.str('data_type')}")
    arrangement = "nvfp4-packed" if kind == "nv" else "mxfp4-packed" if bits == 4 else "scaled"
    inputs = NVFP4_GROUPS if kind == "nv" else _MXFP4_GROUPS if bits == 4 else MXFP8_GROUPS
    rounded = config.int("act_bits", 16, ge=1) == bits
    return Numbers(
        arrangement=arrangement,
        bits=bits,
        group=(1, size),
        activations=inputs if rounded else None,
    )


def _e4m3(config: ConfigReader) -> Numbers:
    config.choice("fmt", ("e4m3",), "e4m3")
    bits_of(config, (8,))
    written = config.raw.get("group_size")
    if written not in (-1, 0):
        raise config.wrong("group_size", "-1 (a scale per output) or 0 (of a tensor)")
    inputs = E4M3_TOKENS if config.bool("act_dynamic", True) else E4M3_TENSOR
    rounded = config.int("act_bits", 16, ge=1) == 8
    return Numbers(
        arrangement="scaled",
        bits=8,
        group=(1 if written else 0, 0),
        activations=inputs if rounded else None,
    )


_FLOATS = {
    **dict.fromkeys(("mx_fp", "mx_fp4", "mx_fp8", "mx_fp4e2m1", "mx_fp8e4m3", "mx_fp_rceil"), "mx"),
    **dict.fromkeys(("nv_fp", "nv_fp4", "nv_fp4_with_static_gs"), "nv"),
    **dict.fromkeys(("fp", "fp8", "fp8_e4m3"), "e4m3"),
}
"""`data_type` -> what it means."""
_PACKINGS = {"mx": "auto_round:mx", "nv": "auto_round:nv", "e4m3": "auto_round:fp8"}
"""How `packing_format` begins."""

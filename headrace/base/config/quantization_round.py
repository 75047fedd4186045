"""AutoRound's floats (Cheng et al. 2023): MXFP4, MXFP8 and NVFP4 as compressed-tensors names their
parts, NVFP4 with scales of its own (E5M3), MXINT4, and e4m3 or e5m2 with a scale per output, tensor
or block. Its integers are GPTQ's and AWQ's. Of MXFP6, MXFP8 in e5m2 and MXINT of other bits it
writes none."""

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
    packings = _PACKINGS[kind]
    if not config.str("packing_format", packings[0]).startswith(packings):
        raise config.wrong("packing_format", " or ".join(f"{one}..." for one in packings))
    if not config.bool("sym", True):
        raise config.wrong("sym", "true, of floats")
    if config.raw.get("rotation_config"):
        raise config.wrong("rotation_config", "absent (activations are not rotated)")
    if kind == "float8":
        return _float8(config)
    bits = bits_of(config, (4, 8) if kind == "mx" else (4,))
    arrangement, size, inputs = _KINDS[kind, bits]
    if config.int("group_size", size) != size:
        raise config.wrong("group_size", f"{size}, of {config.str('data_type')}")
    rounded = config.int("act_bits", 16, ge=1) == bits
    return Numbers(
        arrangement=arrangement,
        bits=bits,
        group=(1, size),
        activations=inputs if rounded else None,
    )


def _float8(config: ConfigReader) -> Numbers:
    """e4m3 with a scale per output, tensor or block, or e5m2."""
    wide = config.choice("fmt", ("e4m3", "e5m2"), "e4m3") == "e5m2" or "e5m2" in config.str(
        "data_type"
    )
    bits_of(config, (8,))
    written = config.raw.get("group_size")
    inputs = E4M3_TOKENS if config.bool("act_dynamic", True) else E4M3_TENSOR
    rounded = config.int("act_bits", 16, ge=1) == 8
    if isinstance(written, list) and not wide:
        outputs, columns = config.list("group_size", of=int, length=2)
        if min(outputs, columns) < 1:
            raise config.wrong("group_size", "two positive sizes, of outputs and of inputs")
        return Numbers(arrangement="fp8-blocks", bits=8, group=(outputs, columns))
    if written not in (-1, 0):
        raise config.wrong(
            "group_size", "-1 (a scale per output), 0 (of a tensor), or of e4m3 two sizes of blocks"
        )
    return Numbers(
        arrangement="scaled-e5m2" if wide else "scaled",
        bits=8,
        group=(1 if written else 0, 0),
        activations=inputs if rounded and not wide else None,
    )


_FLOATS = {
    **dict.fromkeys(("mx_fp", "mx_fp4", "mx_fp8", "mx_fp4e2m1", "mx_fp8e4m3", "mx_fp_rceil"), "mx"),
    **dict.fromkeys(("nv_fp", "nv_fp4", "nv_fp4_with_static_gs"), "nv"),
    **dict.fromkeys(("fp", "fp8", "fp8_e4m3", "fp8_e5m2"), "float8"),
    **dict.fromkeys(("mx_int", "mx_int4"), "mx_int"),
    "nvfp4_v2": "e5m3",
}
"""`data_type` -> what it means."""
_PACKINGS = {
    "mx": ("auto_round:mx", "mxfp"),
    "nv": ("auto_round:nv",),
    "float8": ("auto_round:fp8",),
    "mx_int": ("auto_round:mx_int", "auto_round:mxint"),
    "e5m3": ("auto_round:nvfp4_v2", "auto_round:llm_compressor_nvfp4_e5m3"),
}
"""How `packing_format` may begin."""
_KINDS = {
    ("mx", 4): ("mxfp4-packed", 32, _MXFP4_GROUPS),
    ("mx", 8): ("scaled", 32, MXFP8_GROUPS),
    ("nv", 4): ("nvfp4-packed", 16, NVFP4_GROUPS),
    ("mx_int", 4): ("mxint4-packed", 32, None),
    ("e5m3", 4): ("nvfp4-e5m3", 16, NVFP4_GROUPS),
}
"""Kind and bits -> arrangement, inputs that share a scale, what inputs become."""

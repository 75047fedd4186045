"""How the weights of each format lie in a checkpoint: the tensors that stand for one by name and
shape, as rows of `ARRANGEMENTS`.

A row names the tensors after the weight ("model.layers.0.mlp.up_proj.weight") and its module (the
same without ".weight").
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.base.config.arrangement import Arrangement
from headrace.base.config.foreign_quantization import foreign_format
from headrace.base.config.further_arrangements import FURTHER
from headrace.base.config.looked_up_arrangements import LOOKED_UP
from headrace.base.config.quantized_shapes import (
    awq_shape,
    bnb_shape,
    by_group_members,
    eetq_shape,
    gemv_fast_members,
    gemv_fast_shape,
    gemv_members,
    gpt_oss_members,
    gpt_oss_shape,
    gptq_shape,
    half_members,
    hqq_members,
    marlin_members,
    marlin_shape,
    marlin_sparse_shape,
    nibbles_members,
    nibbles_shape,
    packed_members,
    packed_shape,
    pairs_shape,
    rows_by_group_members,
    scaled_members,
    sextets_shape,
    sparse_members,
    stated_shape,
    tinygemm_members,
    tinygemm_shape,
    turned_members,
    values_shape,
    words_shape,
)

FP8 = ("F8_E4M3",)


_SPARSE = {
    "values": "{module}.compressed",
    "bitmask": "{module}.bitmask",
    "shape": "{module}.shape",
    "scales": "{weight}_scale",
    "zeros": "{weight}_zero_point",
}
_SPARSE_DTYPES = ("BF16", "F16", "F32", "I8", "F8_E4M3")
_AWQ = {
    "values": "{module}.qweight",
    "scales": "{module}.scales",
    "zeros": "{module}.qzeros",
}
_TORCHAO = {
    "values": "{module}._weight_qdata",
    "scales": "{module}._weight_scale",
    "zeros": "{module}._weight_zero_point",
}
_HQQ = (
    "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
"""What HQQ writes beside a weight; only its shape is needed."""
_SMOOTH = "{module}.pre_quant_scale"
"""What inputs are multiplied with before (SmoothQuant, AWQ), where it is not in the norm before."""
OF_MODULE = {"scales": "{module}.scale"}
"""As DeepSeek calls them since V4."""
_BNB = "{weight}.quant_state.bitsandbytes__"
ARRANGEMENTS: Mapping[str, Arrangement] = {
    "gptq": Arrangement(
        roles={
            "values": "{module}.qweight",
            "scales": "{module}.scales",
            "zeros": "{module}.qzeros",
            "order": "{module}.g_idx",
        },
        dtypes=("I32",),
        optional=("order",),
        shape=gptq_shape,
        expected=turned_members,
    ),
    "awq": Arrangement(
        roles=_AWQ,
        dtypes=("I32",),
        shape=awq_shape,
        expected=turned_members,
    ),
    "awq-gemv": Arrangement(
        roles=_AWQ,
        dtypes=("I32",),
        shape=packed_shape,
        expected=gemv_members,
    ),
    "awq-gemv-fast": Arrangement(
        roles=_AWQ,
        dtypes=("I16",),
        shape=gemv_fast_shape,
        expected=gemv_fast_members,
    ),
    "awq-marlin": Arrangement(
        roles={"values": "{module}.qweight", "scales": "{module}.scales"},
        dtypes=("I32",),
        shape=marlin_shape,
        expected=marlin_members,
    ),
    "gptq-marlin": Arrangement(
        roles={"values": "{module}.B", "scales": "{module}.s", "workspace": "{module}.workspace"},
        dtypes=("I32",),
        optional=("workspace",),
        shape=marlin_shape,
        expected=marlin_members,
    ),
    **{
        kind: Arrangement(
            roles={"values": values, "scales": scales, "bitmask": places}
            | {"workspace": "{module}.workspace"},
            dtypes=("I32",),
            optional=("workspace",),
            shape=marlin_sparse_shape,
            expected=marlin_members,
        )
        for kind, values, scales, places in (
            ("gptq-marlin-24", "{module}.B_24", "{module}.s", "{module}.B_meta"),
            ("marlin-24", "{weight}_packed", "{module}.scale_packed", "{module}.meta"),
        )
    },
    "eetq": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scales"},
        dtypes=("I8",),
        shape=eetq_shape,
        expected=lambda shape, numbers: {"scales": ((shape[0],),)},
    ),
    "torchao-tiles": Arrangement(
        roles={
            "values": "{module}._weight_qdata",
            "scales": "{module}._weight_scale_and_zero",
            "zeros": "{module}._weight_scale_and_zero",
        },
        dtypes=("I32",),
        shape=tinygemm_shape,
        expected=tinygemm_members,
    ),
    **{
        kind: Arrangement(
            roles={
                "values": "{weight}",
                "scales": "{weight}_scale",
                "zeros": "{weight}_zero_point",
            },
            dtypes=("I32",),
            optional=optional,
            shape=awq_shape,
            expected=turned_members,
        )
        for kind, optional in (("quark-uint4", ()), ("quark-int4", ("zeros",)))
    },
    "packed": Arrangement(
        roles={
            "values": "{weight}_packed",
            "scales": "{weight}_scale",
            "zeros": "{weight}_zero_point",
            "order": "{weight}_g_idx",
            "shape": "{weight}_shape",
        },
        dtypes=("I32",),
        optional=("zeros", "order", "shape"),
        shape=packed_shape,
        expected=packed_members,
    ),
    "scaled": Arrangement(
        roles={
            "values": "{weight}",
            "scales": "{weight}_scale",
            "zeros": "{weight}_zero_point",
            "smooth": _SMOOTH,
            "inputs": "{module}.input_scale",
            "input_zeros": "{module}.input_zero_point",
        },
        dtypes=("I8", "F8_E4M3"),
        optional=("zeros", "smooth", "inputs", "input_zeros"),
        shape=values_shape,
        expected=scaled_members,
    ),
    "fp8-blocks": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale_inv"},
        dtypes=FP8,
        shape=values_shape,
        expected=scaled_members,
        elsewhere=OF_MODULE,
    ),
    "nvfp4-packed": Arrangement(
        roles={
            "values": "{weight}_packed",
            "scales": "{weight}_scale",
            "outer": "{weight}_global_scale",
        },
        dtypes=("U8",),
        shape=nibbles_shape,
        expected=nibbles_members,
    ),
    "mxfp4-packed": Arrangement(
        roles={"values": "{weight}_packed", "scales": "{weight}_scale"},
        dtypes=("U8",),
        shape=nibbles_shape,
        expected=nibbles_members,
    ),
    "mxfp4-quark": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale"},
        dtypes=("U8", "I8"),
        shape=nibbles_shape,
        expected=nibbles_members,
        elsewhere=OF_MODULE,
    ),
    "nvfp4": Arrangement(
        roles={
            "values": "{weight}",
            "scales": "{weight}_scale",
            "outer": "{weight}_scale_2",
            "smooth": _SMOOTH,
        },
        dtypes=("U8",),
        optional=("smooth",),
        shape=nibbles_shape,
        expected=nibbles_members,
    ),
    "modelopt-int4": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale", "smooth": _SMOOTH},
        dtypes=("U8",),
        optional=("smooth",),
        shape=pairs_shape,
        expected=nibbles_members,
    ),
    "mxfp4-blocks": Arrangement(
        roles={"values": "{weight}_blocks", "scales": "{weight}_scales"},
        dtypes=("U8",),
        shape=gpt_oss_shape,
        expected=gpt_oss_members,
    ),
    **{
        kind: Arrangement(
            roles={"values": "{weight}", "scales": "{weight}_scale"},
            dtypes=("U8",),
            shape=sextets_shape,
            expected=nibbles_members,
        )
        for kind in ("mxfp6-quark", "mxfp6-quark-e3m2")
    },
    "mxfp6-packed": Arrangement(
        roles={"values": "{weight}_packed", "scales": "{weight}_scale"},
        dtypes=("U8",),
        shape=sextets_shape,
        expected=nibbles_members,
    ),
    "sparse-24": Arrangement(
        roles=_SPARSE,
        dtypes=_SPARSE_DTYPES,
        optional=("scales", "zeros"),
        shape=stated_shape,
        expected=half_members,
    ),
    "sparse": Arrangement(
        roles={**_SPARSE, "offsets": "{module}.row_offsets"},
        dtypes=_SPARSE_DTYPES,
        optional=("scales", "zeros"),
        shape=stated_shape,
        expected=sparse_members,
    ),
    "torchao-int8": Arrangement(
        roles=_TORCHAO,
        dtypes=("I8",),
        optional=("zeros",),
        shape=values_shape,
        expected=scaled_members,
    ),
    "torchao-float8": Arrangement(
        roles={role: name for role, name in _TORCHAO.items() if role != "zeros"},
        dtypes=FP8,
        shape=values_shape,
        expected=scaled_members,
    ),
    "torchao-int4": Arrangement(
        roles=_TORCHAO, dtypes=("I8",), shape=nibbles_shape, expected=by_group_members
    ),
    **{
        kind: Arrangement(
            roles={"values": "{module}.W_q", "scales": "{module}.scale", "zeros": "{module}.zero"}
            | {key: f"{{module}}.{key}" for key in _HQQ},
            dtypes=("U8", "I32"),
            optional=tuple(key for key in _HQQ if key != "shape"),
            shape=stated_shape,
            expected=hqq_members,
        )
        for kind in ("hqq", "hqq-axis0")
    },
    **{
        kind: Arrangement(
            roles={"values": "{weight}", "scales": "{module}.scales", "zeros": added},
            dtypes=("U32",),
            shape=words_shape,
            expected=rows_by_group_members,
        )
        for kind, added in (("mlx", "{module}.biases"), ("metal", "{module}.qbiases"))
    },
    **{
        f"mlx-{mode}": Arrangement(
            roles={"values": "{weight}", "scales": "{module}.scales"},
            dtypes=("U32",),
            shape=words_shape,
            expected=rows_by_group_members,
        )
        for mode in ("mxfp4", "nvfp4", "mxfp8")
    },
    **{
        kind: Arrangement(
            roles={
                "values": "{weight}",
                "scales": "{weight}.absmax",
                "levels": "{weight}.quant_map",
                "nf4": _BNB + "nf4",
                "fp4": _BNB + "fp4",
                "nested_scales": "{weight}.nested_absmax",
                "nested_levels": "{weight}.nested_quant_map",
            },
            dtypes=dtypes,
            optional=("nf4", "fp4", "nested_scales", "nested_levels"),
            shape=bnb_shape,
            marked=marked,
        )
        for kind, dtypes, marked in (
            ("bnb-4bit", ("U8",), ""),
            ("bnb-4bit-floats", ("BF16", "F16", "F32"), "scales"),
        )
    },
    **{
        kind: Arrangement(
            roles={"values": "{weight}", "scales": "{weight}_scale"},
            dtypes=("U8",),
            shape=lambda stored: (4 * stored.shape("values")[0], *stored.shape("values")[1:]),
            expected=lambda shape, numbers: {"scales": ((1,), ())},
        )
        for kind in ("ternary", "ternary-inverse")
    },
    "bnb-int8": Arrangement(
        roles={"values": "{weight}", "scales": "{module}.SCB", "format": "{module}.weight_format"},
        dtypes=("I8",),
        optional=("format",),
        shape=values_shape,
        expected=lambda shape, numbers: {"scales": ((shape[0],),)},
    ),
    **FURTHER,
    **LOOKED_UP,
}


def arrangement_of(name: str) -> Arrangement:
    """The row of this name, or that of a package's format."""
    return ARRANGEMENTS[name] if name in ARRANGEMENTS else foreign_format(name).arrangement

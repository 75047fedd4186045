"""Rows of quantized_arrangements.py, with their shapes: what SINQ, Quanto, Four Over Six, BitBLAS,
AutoRound (its own numbers), transformers (Gemma) and SGLang's names stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.base.config.arrangement import Arrangement
from headrace.base.config.quantization import Numbers
from headrace.base.config.quantized_shapes import (
    Shape,
    StoredMembers,
    groups_of,
    nibbles_members,
    nibbles_shape,
    scaled_members,
    values_shape,
)

Forms = Mapping[str, tuple[Shape, ...]]
WORD_FIELDS = {1: 8, 2: 4, 3: 10, 4: 2, 5: 6, 6: 5, 8: 1}
"""Bits of a value -> values in a byte, or of 3, 5 and 6 bits in a word of 32."""


def sinq_shape(stored: StoredMembers) -> Shape:
    """Rows of groups, packed as HQQ does; the scales of inputs say how many there are."""
    words, size = stored.shape("values")
    for role, parts in SINQ_PARTS.items():
        if not stored.has(role) and not all(stored.has(part) for part in parts):
            raise ValueError(f"{stored.names[role]} is missing")
    scales = "scales" if stored.has("scales") else SINQ_PARTS["scales"][0]
    groups = math.prod(stored.shape(scales))
    if -(-groups // WORD_FIELDS[stored.numbers.bits]) != words:
        raise ValueError(f"{groups} groups of {stored.numbers.bits} bits take other rows")
    inputs = stored.shape("columns")[-1]
    if stored.shape("columns") != (1, inputs) or inputs % size or groups * size % inputs:
        raise ValueError(f"{groups} groups of {size} are no rows of {inputs} inputs")
    return groups * size // inputs, inputs


def sinq_tiles_shape(stored: StoredMembers) -> Shape:
    """The same in square tiles: what they are wide is what a row of words is."""
    words, size = stored.shape("values")
    tiles = stored.shape("columns")[0]
    if stored.shape("columns") != (tiles, 1, size):
        raise ValueError(f"scales of columns are {list(stored.shape('columns'))}")
    groups = tiles * size
    if -(-groups // WORD_FIELDS[stored.numbers.bits]) != words:
        raise ValueError(f"{groups} groups of {stored.numbers.bits} bits take other rows")
    outputs, inputs = stored.numbers.size
    inputs = inputs or groups * size // outputs
    outputs = outputs or groups * size // inputs
    if outputs * inputs != groups * size or inputs % size or outputs % size:
        raise ValueError(f"{tiles} tiles of {size} x {size} are no {outputs} x {inputs}")
    return outputs, inputs


SINQ_PARTS = {
    "scales": ("scale_values", "scale_steps", "scale_minima"),
    "zeros": ("zero_values", "zero_steps", "zero_minima"),
}
"""Floats, or bytes, steps and minima that make them."""


def quanto_shape(stored: StoredMembers) -> Shape:
    """Rows of groups, packed as HQQ does but the first in the lowest bits."""
    words, size = stored.shape("values")
    rows = math.prod(stored.shape("scales"))
    if -(-rows * stored.numbers.bits // 8) != words:
        raise ValueError(f"{rows} groups of {stored.numbers.bits} bits take other rows")
    outputs, inputs = stored.numbers.size
    inputs = inputs or rows * size // outputs
    outputs = rows * size // inputs if inputs else 0
    if outputs * inputs != rows * size or inputs % size:
        raise ValueError(f"{rows} groups of {size} are no rows of {inputs} inputs")
    return outputs, inputs


def fouroversix_shape(stored: StoredMembers) -> Shape:
    """What its metadata say first; rows and columns may be padded to whole tiles of scales."""
    content = stored.content("metadata")
    width = len(content) // 6
    if width not in (4, 8) or len(content) % 6:
        raise ValueError(f"{stored.names['metadata']} is no list of six integers")
    sizes = [int.from_bytes(content[i * width : (i + 1) * width], "little") for i in range(6)]
    outputs, inputs, rows, columns, _, tiled = sizes
    group = (stored.numbers.group or (1, 0))[1]
    if stored.shape("values") != (rows, columns // 2) or rows < outputs or columns < inputs:
        raise ValueError(f"its metadata say {outputs} x {inputs} in {rows} x {columns}")
    if rows % 128 or columns % (4 * group):
        raise ValueError(f"{rows} x {columns} are no tiles of 128 x {4 * group}")
    if tiled != 1:
        raise ValueError("its scales are not in the layout of Blackwell's tensor cores")
    if math.prod(stored.shape("scales")) != rows * columns // group:
        raise ValueError(f"{stored.names['scales']} has the shape {list(stored.shape('scales'))}")
    return outputs, inputs


def bitblas_shape(stored: StoredMembers) -> Shape:
    """Bytes along the inputs, words of 32 bits; of four dimensions they are tiles of one GPU."""
    sizes = stored.shape("values")
    if len(sizes) != 2:
        raise ValueError("tiles of a GPU's own (propagate_b) are not read")
    inputs = sizes[1] * 8 // stored.numbers.bits
    size = (stored.numbers.group or (1, 0))[1]
    if sizes[1] % 4 or (size and inputs % size):
        raise ValueError(f"words of 32 bits and groups of {size} do not divide {inputs} inputs")
    return sizes[0], inputs


def bitblas_members(shape: Shape, numbers: Numbers) -> Forms:
    groups = groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {
        "scales": ((shape[0], groups),),
        "zeros": ((groups, shape[0] * numbers.bits // 8),),
    }


def row_shape(stored: StoredMembers) -> Shape:
    outputs, size = stored.shape("values")
    return outputs, size * 8 // stored.numbers.bits


def row_members(shape: Shape, numbers: Numbers) -> Forms:
    return {
        "scales": ((shape[0], 1), (shape[0],)),
        "of_inputs": ((), (1,)),
        "of_outputs": ((), (1,)),
    }


def row_table_members(shape: Shape, numbers: Numbers) -> Forms:
    """A scale for each row, or for each run of one."""
    return {"scales": tuple((shape[0], n) for n in range(1, shape[1] + 1) if shape[1] % n == 0)}


_SINQ_META = "{module}.meta."
_QUANTIZED = "{module}.quantized_weight_"
_SCALED = {
    "values": "{weight}",
    "scales": "{weight}_scale",
    "inputs": "{module}.input_scale",
}
FURTHER = {
    "int8-blocks": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale_inv"},
        dtypes=("I8",),
        shape=values_shape,
        expected=scaled_members,
    ),
    "signed-pairs": Arrangement(
        roles={
            "values": "{weight}",
            "scales": "{weight}_scale_inv",
            "inputs": "{module}.input_scale",
        },
        dtypes=("I8",),
        optional=("inputs",),
        shape=nibbles_shape,
        expected=nibbles_members,
    ),
    "scaled-e5m2": Arrangement(
        roles=_SCALED,
        dtypes=("F8_E5M2",),
        optional=("inputs",),
        shape=values_shape,
        expected=scaled_members,
    ),
    **{
        kind: Arrangement(
            roles={"values": "{weight}_packed", "scales": "{weight}_scale"},
            dtypes=("U8",),
            shape=nibbles_shape,
            expected=nibbles_members,
        )
        for kind in ("mxint4-packed", "nvfp4-e5m3")
    },
    **{
        f"sinq{tiles}{levels}": Arrangement(
            roles={
                "values": "{module}.W_q",
                "columns": _SINQ_META + "scale2",
                "scales": _SINQ_META + "scale",
                "zeros": _SINQ_META + "zero",
                "scale_values": _SINQ_META + "scale.x",
                "scale_steps": _SINQ_META + "scale.s",
                "scale_minima": _SINQ_META + "scale.m",
                "zero_values": _SINQ_META + "zero.x",
                "zero_steps": _SINQ_META + "zero.s",
                "zero_minima": _SINQ_META + "zero.m",
                "awq_scale": _SINQ_META + "awq_scale",
            },
            dtypes=("U8", "I32"),
            optional=(*SINQ_PARTS, *SINQ_PARTS["scales"], *SINQ_PARTS["zeros"], "awq_scale"),
            shape=sinq_tiles_shape if tiles else sinq_shape,
            group=lambda stored: stored.shape("values")[1],
        )
        for tiles in ("", "-2d")
        for levels in ("", "-nf4", "-nf3")
    },
    **{
        kind: Arrangement(
            roles={
                "values": "{weight}._data",
                "scales": "{weight}._scale",
                "of_inputs": "{module}.input_scale",
                "of_outputs": "{module}.output_scale",
            },
            dtypes=dtypes,
            optional=("of_inputs", "of_outputs"),
            shape=values_shape,
            expected=lambda shape, numbers: {"scales": ((shape[0], 1), (shape[0],), (), (1,))},
        )
        for kind, dtypes in (("quanto", ("I8", "F8_E4M3")), ("quanto-e5m2", ("F8_E5M2",)))
    },
    "quanto-packed": Arrangement(
        roles={
            "values": "{weight}._data._data",
            "scales": "{weight}._scale",
            "zeros": "{weight}._shift",
            "of_inputs": "{module}.input_scale",
            "of_outputs": "{module}.output_scale",
        },
        dtypes=("U8",),
        optional=("of_inputs", "of_outputs"),
        shape=quanto_shape,
        group=lambda stored: stored.shape("values")[1],
    ),
    **{
        kind: Arrangement(
            roles={
                "values": _QUANTIZED + "values",
                "scales": _QUANTIZED + "scale_factors",
                "outer": _QUANTIZED + "amax",
                "metadata": _QUANTIZED + "metadata",
            },
            dtypes=("U8",),
            shape=fouroversix_shape,
            expected=lambda shape, numbers: {"outer": ((), (1,))},
        )
        for kind in ("fouroversix-nvfp4", "fouroversix-mxfp4")
    },
    "bitblas": Arrangement(
        roles={
            "values": "{module}.qweight",
            "scales": "{module}.scales",
            "zeros": "{module}.zeros",
        },
        dtypes=("I8",),
        shape=bitblas_shape,
        expected=bitblas_members,
    ),
    "row-integers": Arrangement(
        roles={
            "values": "{module}.weight",
            "scales": "{weight}_scale",
            "of_inputs": "{module}.input_activation_scale",
            "of_outputs": "{module}.output_activation_scale",
        },
        dtypes=("U8", "I8"),
        optional=("of_inputs", "of_outputs"),
        shape=row_shape,
        expected=row_members,
    ),
    "row-integers-table": Arrangement(
        roles={"values": "{module}.embedding_quantized", "scales": "{module}.embedding_scale"},
        dtypes=("U8", "I8"),
        shape=row_shape,
        expected=row_table_members,
    ),
}

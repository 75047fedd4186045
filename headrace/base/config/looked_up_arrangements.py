"""Rows of quantized_arrangements.py, with their shapes: weights whose values are looked up (AQLM,
VPTQ, EXL3), whose groups have bits of their own (EXL2), whose inputs are rotated (FP-Quant,
HIGGS, QuIP#), or whose scales are quantized (SpQR)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from headrace.base.config.arrangement import Arrangement
from headrace.base.config.quantization import Codebook, Numbers
from headrace.base.config.quantized_shapes import Shape, StoredMembers, nibbles_members

Forms = Mapping[str, tuple[Shape, ...]]


def _book(numbers: Numbers) -> Codebook:
    assert numbers.codebook is not None, numbers
    return numbers.codebook


HADAMARD_ORDERS = (172, 156, 140, 108, 60, 52, 36, 28, 20, 12, 1)


def hadamard_order(length: int) -> int | None:
    """The first of these orders that divides a length; None: the quotient is no power of two."""
    order = next(one for one in HADAMARD_ORDERS if length % one == 0)
    rest = length // order
    return order if rest > 0 and rest & (rest - 1) == 0 else None


def quip_shape(stored: StoredMembers) -> Shape:
    """Signs of outputs and inputs say how many there are."""
    (outputs,), (inputs,) = stored.shape("output_signs"), stored.shape("input_signs")
    words = inputs * stored.numbers.bits // 64
    if outputs % 16 or inputs % 64 or stored.shape("values") != (outputs, words):
        raise ValueError(f"{outputs} x {inputs} of {stored.numbers.bits} bits take other words")
    for size in (outputs, inputs):
        if hadamard_order(size) is None:
            raise ValueError(f"no Hadamard matrix of {size} is known here")
    return outputs, inputs


def aqlm_shape(stored: StoredMembers) -> Shape:
    book = _book(stored.numbers)
    outputs, inputs, books = stored.shape("values")
    if books != book.books:
        raise ValueError(f"num_codebooks is {book.books}")
    return outputs * book.outputs, inputs * book.inputs


def aqlm_members(shape: Shape, numbers: Numbers) -> Forms:
    book = _book(numbers)
    return {
        "codebooks": ((book.books, 1 << book.bits, book.outputs, book.inputs),),
        "scales": ((shape[0] // book.outputs, 1, 1, 1),),
    }


def vptq_shape(stored: StoredMembers) -> Shape:
    book = _book(stored.numbers)
    books, vectors, _ = stored.shape("values")
    if books != book.books:
        raise ValueError(f"group_num is {book.books}")
    outputs = vectors * book.outputs if book.num_outputs == -1 else book.num_outputs
    if -(-outputs // book.outputs) != vectors:
        raise ValueError(f"out_features is {outputs}, in vectors of {book.outputs}")
    for role, wanted in (("residual", book.residual_bits > 0), ("outliers", book.outliers > 0)):
        if stored.has(role) != wanted:
            raise ValueError(f"{stored.names[role]} {'is missing' if wanted else 'is surplus'}")
    return outputs, book.outliers + books * book.run


def vptq_members(shape: Shape, numbers: Numbers) -> Forms:
    book = _book(numbers)
    bits = book.bits + book.residual_bits
    vectors, by_input = -(-shape[0] // book.outputs), ((shape[1],),)
    outliers = -(-shape[0] // max(1, book.outlier_outputs))
    return {
        "values": ((book.books, vectors, -(-book.run * bits // 32)),),
        "codebooks": ((book.books, book.outputs << book.bits),),
        "residual": ((book.books, book.outputs << book.residual_bits),),
        "outliers": ((1, outliers, book.outliers),),
        "order": by_input,
        "scales": by_input,
        "added": by_input,
    }


def exl2_shape(stored: StoredMembers) -> Shape:
    rows, outputs = stored.shape("values")
    if math.prod(stored.shape("groups")) > 2 * rows:  # before they are read
        raise ValueError(f"{stored.names['groups']} has more pairs than there are rows")
    inputs = sum(size for _, size in exl2_groups(stored.content("groups"), rows))
    if stored.has("inverse") and stored.shape("inverse") != (inputs,):
        raise ValueError(f"its groups have {inputs} inputs, {stored.names['inverse']} others")
    if outputs % 8:
        raise ValueError("its outputs must be a multiple of 8")
    return outputs, inputs


def exl2_groups(stored: bytes, rows: int) -> list[tuple[int, int]]:
    """(bits, inputs) of each group of a weight with so many rows of words: pairs of bits and first
    row are stored. ValueError: they are none."""
    numbers = struct.unpack(f"<{len(stored) // 2}H", stored)
    bits, firsts = numbers[::2], numbers[1::2]
    if not bits or len(bits) != len(firsts) or firsts[0] != 0:
        raise ValueError("its groups must be pairs of bits and first row, from row 0 on")
    groups = []
    for width, first, last in zip(bits, firsts, (*firsts[1:], rows), strict=True):
        if width not in (2, 3, 4, 5, 6, 8):
            raise ValueError(f"a group has {width} bits, not 2, 3, 4, 5, 6 or 8")
        if last <= first or (last - first) * 32 % width:
            raise ValueError(f"a group of {width} bits has rows {first} to {last}")
        groups.append((width, (last - first) * 32 // width))
    return groups


def exl2_members(shape: Shape, numbers: Numbers) -> Forms:
    return {"inverse": ((shape[1],),)}


MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Of the codebooks that are computed so, by the tensor that says so."""


def exl3_shape(stored: StoredMembers) -> Shape:
    inputs, outputs, words = stored.shape("values")
    if words % 16 or not 1 <= words // 16 <= 8:
        raise ValueError("its words must be 16 for each of 1 to 8 bits")
    if inputs % 8 or outputs % 8:
        raise ValueError("both sizes must be multiples of 128")
    for role, multiplier in MULTIPLIERS.items():
        if not stored.has(role):
            continue
        single = math.prod(stored.shape(role)) == 1
        if not single or stored.content(role) != multiplier.to_bytes(4, "little"):
            raise ValueError(f"{stored.names[role]} is none of the known codebooks")
    for packed, plain in (("su", "suh"), ("sv", "svh")):
        if not stored.has(packed) and not stored.has(plain):
            raise ValueError(f"{stored.names[plain]} is missing")
    return outputs * 16, inputs * 16


def exl3_members(shape: Shape, numbers: Numbers) -> Forms:
    return {
        "suh": ((shape[1],),),
        "svh": ((shape[0],),),
        "su": ((shape[1] // 16,),),
        "sv": ((shape[0] // 16,),),
    }


def rotated_shape(stored: StoredMembers) -> Shape:
    outputs, inputs = stored.shape("values")
    inputs = inputs if stored.numbers.bits == 16 else inputs * 2
    rotation = stored.shape("rotation")
    if len(rotation) != 2 or rotation[0] != rotation[1] or not 1 <= rotation[0] <= 1024:
        raise ValueError(f"{stored.names['rotation']} is no square matrix of at most 1024")
    if inputs % rotation[0]:
        raise ValueError(f"blocks of {rotation[0]} inputs do not divide {inputs}")
    return outputs, inputs


def rotated_members(shape: Shape, numbers: Numbers) -> Forms:
    forms = dict.fromkeys(("plain", "floats"), ((0,),))
    if numbers.bits == 16:
        return {"plain": ((0,),)}
    return {**forms, **nibbles_members(shape, numbers)}


SPQR_TILE = 16


def spqr_shape(stored: StoredMembers) -> Shape:
    """Words of 64 bits hold 16 inputs of an output. Outputs follow from where each of them, or of
    16 together, begins among the floats; inputs also from their order."""
    words, offsets = math.prod(stored.shape("values")), math.prod(stored.shape("offsets")) - 1
    ordered = 2 * math.prod(stored.shape("order")) if stored.has("order") else 0
    fitting = [
        (outputs, words * SPQR_TILE // outputs)
        for outputs in (offsets, offsets * SPQR_TILE)
        if outputs > 0 and outputs % SPQR_TILE == 0 and words % outputs == 0
    ]
    if ordered:
        fitting = [shape for shape in fitting if shape[1] == ordered]
    if len(fitting) > 1:  # where 16 outputs share a beginning, it is a multiple of 16
        starts = struct.unpack(f"<{offsets + 1}i", stored.content("offsets"))
        interleaved = all(start % SPQR_TILE == 0 for start in starts) and starts[-1] > 0
        fitting = fitting[interleaved:][:1]
    if not fitting:
        raise ValueError(f"{words} words and {offsets} beginnings fit no tiles of 16 x 16")
    return fitting[0]


def higgs_shape(stored: StoredMembers) -> Shape:
    """Words of 16 bits [O bits / 16, I]."""
    book = _book(stored.numbers)
    words, inputs = stored.shape("values")
    outputs = words * 16 // stored.numbers.bits
    chunk = higgs_chunk(book)
    if outputs % chunk or words * 16 % stored.numbers.bits or inputs % book.rotated:
        raise ValueError(
            f"its kernel's tiles of {chunk} outputs, or blocks of {book.rotated} inputs, do not "
            f"divide {outputs} x {inputs}"
        )
    return outputs, inputs


def higgs_chunk(book: Codebook) -> int:
    """Outputs whose indices are mixed."""
    return book.tile * {2: 8, 3: 16, 4: 4}[book.bits]


def higgs_members(shape: Shape, numbers: Numbers) -> Forms:
    size = (numbers.group or (1, 256))[1]
    levels = 1 << numbers.bits
    return {
        "scales": ((shape[0], shape[1] // size),),
        "pairs": ((levels, levels, 2),),
        "levels": ((levels,),),
    }


_ROTATION = {
    "rotation": "{module}.forward_hadamard_matrix",
    "backward": "{module}.backward_hadamard_matrix",
    "of_inputs": "{module}.act_global_scale",
    "plain": "{weight}",
}
"""Of FP-Quant; a plain weight without elements may stand beside the quantized one."""
LOOKED_UP = {
    **{
        kind: Arrangement(
            roles={
                "values": "{module}.qweight",
                "scales": "{module}.scales",
                "outer": "{module}.weight_global_scale",
                "floats": "{module}.dqweight",
                **_ROTATION,
            },
            dtypes=("U8",),
            optional=("floats", "backward", "of_inputs", "plain"),
            shape=rotated_shape,
            expected=rotated_members,
        )
        for kind in ("rotated-nvfp4", "rotated-mxfp4")
    },
    "rotated-floats": Arrangement(
        roles={
            "values": "{module}.dqweight",
            "outer": "{module}.weight_global_scale",
            **_ROTATION,
        },
        dtypes=("BF16", "F16", "F32"),
        optional=("outer", "backward", "of_inputs", "plain"),
        shape=rotated_shape,
        expected=rotated_members,
    ),
    "aqlm": Arrangement(
        roles={
            "values": "{module}.codes",
            "codebooks": "{module}.codebooks",
            "scales": "{module}.scales",
        },
        dtypes=("I8", "I16"),
        shape=aqlm_shape,
        expected=aqlm_members,
    ),
    "vptq": Arrangement(
        roles={
            "values": "{module}.indices",
            "codebooks": "{module}.centroids.weight",
            "residual": "{module}.res_centroids.weight",
            "outliers": "{module}.outlier_indices",
            "outlier_book": "{module}.outlier_centroids.weight",
            "order": "{module}.perm",
            "scales": "{weight}_scale",
            "added": "{weight}_bias",
        },
        dtypes=("I32",),
        optional=("residual", "outliers", "outlier_book", "order", "scales", "added"),
        shape=vptq_shape,
        expected=vptq_members,
    ),
    "exl2": Arrangement(
        roles={
            "values": "{module}.q_weight",
            "groups": "{module}.q_groups",
            "scales": "{module}.q_scale",
            "largest": "{module}.q_scale_max",
            "inverse": "{module}.q_invperm",
            "order": "{module}.q_perm",
        },
        dtypes=("I32",),
        optional=("inverse", "order"),
        shape=exl2_shape,
        expected=exl2_members,
    ),
    "higgs": Arrangement(
        roles={
            "values": "{module}.weight",
            "scales": "{module}.scales",
            "pairs": "{module}.tables2",
            "levels": "{module}.tables",
        },
        dtypes=("I16",),
        optional=("levels",),
        shape=higgs_shape,
        expected=higgs_members,
    ),
    "quip": Arrangement(
        roles={
            "values": "{module}.Qidxs",
            "input_signs": "{module}.SU",
            "output_signs": "{module}.SV",
            "scale": "{module}.Wscale",
            "book": "{module}.codebook_id",
            "merged_scales": "{module}.fuse_scales",
        },
        dtypes=("I64",),
        optional=("book", "merged_scales"),
        shape=quip_shape,
        expected=lambda shape, numbers: {"scale": ((), (1,))},
    ),
    "spqr": Arrangement(
        roles={
            "values": "{module}.dense_weights",
            "offsets": "{module}.row_offsets",
            "added": "{module}.col_vals",
            "order": "{module}.in_perm",
        },
        dtypes=("I64",),
        optional=("order",),
        shape=spqr_shape,
    ),
    "exl3": Arrangement(
        roles={"values": "{module}.trellis"}
        | {role: f"{{module}}.{role}" for role in ("suh", "svh", "su", "sv", "mcg", "mul1")},
        dtypes=("I16",),
        optional=("suh", "svh", "su", "sv", "mcg", "mul1"),
        shape=exl3_shape,
        expected=exl3_members,
    ),
}

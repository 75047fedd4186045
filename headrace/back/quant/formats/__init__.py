"""The numbers of quantized checkpoint tensors: for each arrangement (base/config/
quantized_tensors.py), what a rectangle of the weight is made of.

A reader returns `Groups`: values, and scales (and zero points) that groups of columns share. It
reads only the tensors' parts that it needs, wherever they are to be (host or device). Nothing here
knows kernels; kernels never see a format.

R rows, C columns of the rectangle, G groups of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from headrace.back.quant.formats import (
    bitsandbytes,
    exllama,
    floats4,
    floats6,
    higgs,
    hqq,
    packed,
    quip,
    rotated,
    scaled,
    sparse,
    spqr,
    ternary,
    tiles,
    vectors,
)
from headrace.back.quant.formats.groups import Groups, Read
from headrace.base.config.foreign_quantization import foreign_format
from headrace.base.config.quantized_tensors import QuantizedTensor

Reader = Callable[[QuantizedTensor, Read, slice, slice], Groups]


def smoothed(reader: Reader) -> Reader:
    """With what inputs are multiplied with before, where that is stored."""

    def read_smoothed(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
        groups = reader(tensor, read, rows, columns)
        if "smooth" not in tensor.members:
            return groups
        return groups.times_inputs(read("smooth", columns))

    return read_smoothed


READERS: Mapping[str, Reader] = {
    "gptq": packed.gptq,
    "awq": packed.awq,
    "awq-gemv": packed.awq_gemv,
    "awq-gemv-fast": packed.awq_gemv_fast,
    "awq-marlin": tiles.marlin,
    "gptq-marlin": tiles.marlin,
    "gptq-marlin-24": tiles.marlin_sparse,
    "marlin-24": tiles.marlin_sparse,
    "eetq": tiles.eetq,
    "torchao-tiles": tiles.tinygemm,
    "quark-uint4": packed.awq,
    "quark-int4": packed.awq,
    "packed": packed.compressed,
    "scaled": smoothed(scaled.scaled),
    "fp8-blocks": scaled.scaled,
    "bnb-int8": scaled.bitsandbytes,
    "nvfp4": smoothed(floats4.modelopt),
    "modelopt-int4": smoothed(packed.modelopt),
    "nvfp4-packed": floats4.compressed,
    "mxfp4-packed": floats4.powers,
    "mxfp4-quark": floats4.powers,
    "mxfp4-blocks": floats4.gpt_oss,
    **dict.fromkeys(("mxfp6-packed", "mxfp6-quark", "mxfp6-quark-e3m2"), floats6.powers),
    **dict.fromkeys(("bnb-4bit", "bnb-4bit-floats"), bitsandbytes.levels),
    "sparse-24": sparse.two_of_four,
    "sparse": sparse.any_pattern,
    "torchao-int8": scaled.scaled,
    "torchao-float8": scaled.scaled,
    "torchao-int4": packed.torchao,
    "hqq": hqq.by_input,
    "hqq-axis0": hqq.by_output,
    "quanto": scaled.scaled,
    "quanto-e5m2": scaled.scaled,
    "scaled-e5m2": scaled.scaled,
    "int8-blocks": scaled.scaled,
    "signed-pairs": packed.signed_pairs,
    "quanto-packed": hqq.quanto,
    **dict.fromkeys(("sinq", "sinq-nf4", "sinq-nf3"), hqq.sinq),
    **dict.fromkeys(("sinq-2d", "sinq-2d-nf4", "sinq-2d-nf3"), hqq.sinq_tiles),
    "mxint4-packed": floats4.mxint4,
    "nvfp4-e5m3": floats4.e5m3,
    "bitblas": packed.bitblas,
    "row-integers": packed.by_row,
    "row-integers-table": packed.by_row,
    "fouroversix-nvfp4": floats4.in_tiles(floats4.modelopt),
    "fouroversix-mxfp4": floats4.in_tiles(floats4.powers),
    "mlx": packed.mlx,
    "metal": packed.mlx,
    "mlx-mxfp4": floats4.in_words(floats4.powers),
    "mlx-nvfp4": floats4.in_words(floats4.modelopt),
    "mlx-mxfp8": floats4.in_words(floats4.microscaled),
    "rotated-nvfp4": rotated.nvfp4,
    "rotated-mxfp4": rotated.mxfp4,
    "rotated-floats": rotated.plain,
    "quip": quip.quip,
    "spqr": spqr.spqr,
    "higgs": higgs.higgs,
    "aqlm": vectors.aqlm,
    "vptq": vectors.vptq,
    "exl2": exllama.exl2,
    "exl3": exllama.exl3,
    "ternary": ternary.times,
    "ternary-inverse": ternary.over,
}
"""Arrangement -> reader."""
WHOLE = ("quip",)
"""Arrangements whose readers take whole weights apart, whatever rows are asked for."""
KEPT_READERS: Mapping[str, Reader] = {
    **READERS,
    "nvfp4": floats4.modelopt_bits,
    "nvfp4-packed": floats4.compressed_bits,
    "mxfp4-packed": floats4.bits,
    "mxfp4-quark": floats4.bits,
    "mxfp4-blocks": floats4.gpt_oss_bits,
    **dict.fromkeys(("bnb-4bit", "bnb-4bit-floats"), bitsandbytes.bits),
    "fouroversix-nvfp4": floats4.in_tiles(floats4.modelopt_bits),
    "fouroversix-mxfp4": floats4.in_tiles(floats4.bits),
    "mlx-mxfp4": floats4.in_words(floats4.bits),
    "mlx-nvfp4": floats4.in_words(floats4.modelopt_bits),
}
"""The same for weights that are kept as they are stored: values are their bits."""


class _Foreign(Protocol):
    """What a package's format has for this layer."""

    groups: Reader


def reader_of(arrangement: str) -> Reader:
    """Of a row, or of a package's format (base/config/foreign_quantization.py)."""
    if arrangement in READERS:
        return READERS[arrangement]
    return cast(_Foreign, foreign_format(arrangement)).groups

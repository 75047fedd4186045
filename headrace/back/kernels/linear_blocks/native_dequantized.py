"""Linear with block-quantized weights by the native kernels, where many rows of x are multiplied as
they are.

Few rows take the kernel of native.py. Many pay the dequantizing of the weights once and leave out
what costs it most: as int8, the sums of every 16 or 32 inputs leave the matrix tiles
(native_linear_blocks_dequantized.cpp). T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.kernels.linear_blocks import native
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_blocks.op import Linear, LinearBlocksProblem, is_plain
from headrace.back.kernels.native.library import INT32, INT64, POINTER, NativeLibrary, loaded
from headrace.back.kernels.op import Kernel

NAME = "linear_blocks_dequantized"
_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 5, *(INT32,) * 2)


def bind_with(
    library: NativeLibrary,
    problem: LinearBlocksProblem,
    weight: BlockWeight,
    bias_O: torch.Tensor | None,
) -> Linear:
    """The kernels of one library; keeps the weight and the bias."""
    assert problem.plain_from is not None, problem
    few = native.bind_with(library, replace(problem, plain_from=None), weight, bias_O)
    many = native.bind_rows(library.bind(NAME, *_ARGUMENTS), problem, weight, bias_O)
    return lambda x: (many if is_plain(problem, x) else few)(x)


def _supports(problem: LinearBlocksProblem) -> str | None:
    if problem.plain_from is None:
        return "multiplies many rows as they are"
    if problem.dtype != torch.bfloat16:
        return f"multiplies rows of {torch.bfloat16}, not of {problem.dtype}"
    if (reason := native.unserved(problem)) is not None:
        return reason
    return None if loaded().has(NAME) else "needs matrix tiles (AMX)"


KERNEL = Kernel(
    name="native_dequantized",
    supports=_supports,
    bind=lambda problem, weight, bias_O: bind_with(loaded(), problem, weight, bias_O),
)

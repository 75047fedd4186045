"""Adapters of rows by the native kernel: rows of one slot are multiplied together, so that its A
and B are read once."""

from __future__ import annotations

import torch

from headrace.back.kernels.lora_linear.op import (
    LoraLinear,
    LoraLinearProblem,
    LoraWeights,
    check_weights,
)
from headrace.back.kernels.native.library import (
    DTYPES,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

_ARGUMENTS = (*(POINTER,) * 9, *(INT64,) * 8, INT32, INT32)


def bind_with(
    library: NativeLibrary, problem: LoraLinearProblem, weights: LoraWeights
) -> LoraLinear:
    """The kernel of one library; keeps the weights."""
    check_weights(problem, weights)
    kernel, code = library.bind("lora_linear", *_ARGUMENTS), DTYPES[problem.dtype]
    y_code, turn = DTYPES[problem.y_dtype], weights.turn_S2O
    parts = torch.tensor(problem.parts, dtype=torch.int64)
    inputs, outputs = problem.inputs, problem.outputs

    def lora_linear(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        rows = x_TI.shape[0]
        assert x_TI.shape == (rows, inputs) and y_TO.shape == (rows, outputs), x_TI.shape
        assert slot_T.shape == (rows,) and slot_T.dtype == torch.int32, slot_T.shape
        assert x_TI.dtype == problem.dtype and y_TO.dtype == problem.y_dtype, y_TO.dtype
        assert y_TO.stride(1) == 1 and slot_T.is_contiguous(), y_TO.stride()
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        # Addresses are asked for at each call: the closure is what keeps the tensors alive.
        kernel(
            x_TI.data_ptr(), y_TO.data_ptr(), slot_T.data_ptr(), weights.a_SKI.data_ptr(),
            weights.b_SRO.data_ptr(), weights.scale_SP.data_ptr(), weights.rank_SP.data_ptr(),
            None if turn is None else turn.data_ptr(), parts.data_ptr(), rows, inputs, outputs,
            parts.numel(), problem.rank, problem.slots,
            x_TI.stride(0), y_TO.stride(0), code, y_code,
        )  # fmt: skip

    return lora_linear


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, weights: bind_with(loaded(), problem, weights),
    invariant=True,
)

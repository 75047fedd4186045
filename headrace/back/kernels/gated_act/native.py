"""Gated activation by the native kernel: one pass over the merged projection."""

from __future__ import annotations

import torch

from headrace.back.kernels.gated_act.op import GatedAct, GatedActProblem
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

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
_ARGUMENTS = (POINTER, POINTER, INT64, INT64, INT64, INT32, INT32)


def bind_with(library: NativeLibrary, problem: GatedActProblem) -> GatedAct:
    """The kernel of one library."""
    kernel = library.bind("gated_act", *_ARGUMENTS)
    width, code = problem.width, DTYPES[problem.dtype]
    activation = ACTIVATIONS[problem.activation]

    def gated_act(gate_up_T2I: torch.Tensor) -> torch.Tensor:
        assert gate_up_T2I.dtype == problem.dtype and gate_up_T2I.stride(1) == 1
        rows, columns = gate_up_T2I.shape
        assert columns == 2 * width, (columns, width)
        y_TI = gate_up_T2I.new_empty(rows, width)
        kernel(
            gate_up_T2I.data_ptr(), y_TI.data_ptr(), rows, width, gate_up_T2I.stride(0),
            activation, code,
        )  # fmt: skip
        return y_TI

    return gated_act


def _supports(problem: GatedActProblem) -> str | None:
    if problem.activation not in ACTIVATIONS:
        return f"knows {', '.join(ACTIVATIONS)}, not {problem.activation}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

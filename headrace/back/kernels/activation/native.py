"""Activation by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.activation.op import Activation, ActivationProblem
from headrace.back.kernels.gated_act.native import ACTIVATIONS as GATED
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

ACTIVATIONS = {**GATED, "tanh": 5, "sigmoid": 6}


def bind_with(library: NativeLibrary, problem: ActivationProblem) -> Activation:
    """The kernel of one library."""
    kernel = library.bind("activation", POINTER, POINTER, INT64, INT32, INT32)
    number, code = ACTIVATIONS[problem.activation], DTYPES[problem.dtype]

    def activation(x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.dtype == problem.dtype and x_TI.is_contiguous(), (x_TI.dtype, x_TI.stride())
        y_TI = x_TI.new_empty(x_TI.shape)
        kernel(x_TI.data_ptr(), y_TI.data_ptr(), x_TI.numel(), number, code)
        return y_TI

    return activation


def _supports(problem: ActivationProblem) -> str | None:
    if problem.activation not in ACTIVATIONS:
        return f"knows {', '.join(ACTIVATIONS)}, not {problem.activation}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

"""A gate beside a norm by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.gated_norm.op import GATES, GatedNorm, GatedNormProblem, check_weight
from headrace.back.kernels.native.library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 6, FLOAT, INT32, INT32, INT32)


def bind_with(
    library: NativeLibrary, problem: GatedNormProblem, weight_E: torch.Tensor | None
) -> GatedNorm:
    """The kernel of one library."""
    check_weight(problem, weight_E)
    kernel = library.bind("gated_norm", *_ARGUMENTS)
    weight_E = None if weight_E is None else weight_E.contiguous()
    width, group = problem.width, problem.group or problem.width
    norm_first, gate = int(problem.norm_first), GATES.index(problem.gate)
    spread, code = problem.spread, DTYPES[problem.dtype]

    def gated_norm(x_TE: torch.Tensor, gate_TE: torch.Tensor) -> torch.Tensor:
        assert x_TE.shape[1] == width == gate_TE.shape[1] * spread, (x_TE.shape, gate_TE.shape)
        assert x_TE.dtype == gate_TE.dtype == problem.dtype, (x_TE.dtype, gate_TE.dtype)
        assert x_TE.stride(1) == gate_TE.stride(1) == 1, (x_TE.stride(), gate_TE.stride())
        y_TE = x_TE.new_empty(x_TE.shape)
        kernel(
            x_TE.data_ptr(), gate_TE.data_ptr(), None if weight_E is None else weight_E.data_ptr(),
            y_TE.data_ptr(), x_TE.shape[0], width, group, spread, x_TE.stride(0),
            gate_TE.stride(0), problem.eps, norm_first, gate, code,
        )  # fmt: skip
        return y_TE

    return gated_norm


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem, weight_E: bind_with(loaded(), problem, weight_E),
    invariant=True,
)

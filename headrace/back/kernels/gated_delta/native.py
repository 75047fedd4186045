"""The gated delta rule by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.gated_delta.op import GatedDelta, GatedDeltaProblem, check_weights
from headrace.back.kernels.gated_scan.native import ROW_TYPES, row_arguments
from headrace.back.kernels.gated_scan.op import ScanRows
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

MAX_KEY_DIM = 256
_ARGUMENTS = (*(POINTER,) * 9, *ROW_TYPES, *(INT64,) * 10, FLOAT, FLOAT, INT32, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: GatedDeltaProblem,
    decay_H: torch.Tensor,
    bias: torch.Tensor,
) -> GatedDelta:
    """The kernel of one library."""
    check_weights(problem, decay_H, bias)
    kernel = library.bind("gated_delta", *_ARGUMENTS)
    decay_H, bias, code = decay_H.contiguous(), bias.contiguous(), DTYPES[problem.dtype]
    sizes = problem.key_heads, problem.heads, problem.key_dim, problem.value_dim
    bound, beta_scale, per_channel = problem.bound, problem.beta_scale, int(problem.per_channel)

    def gated_delta(
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_THV: torch.Tensor,
        a: torch.Tensor,
        b_TH: torch.Tensor,
        state_MHKV: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        inputs = q_TGK, k_TGK, v_THV, a, b_TH
        assert all(one.dtype == problem.dtype and one[0].is_contiguous() for one in inputs)
        assert state_MHKV.dtype == torch.float32 and state_MHKV[0].is_contiguous()
        y_THV = v_THV.new_empty(v_THV.shape)
        at, wide = row_arguments(rows, state_MHKV)
        kernel(
            *(one.data_ptr() for one in inputs), decay_H.data_ptr(), bias.data_ptr(),
            y_THV.data_ptr(), state_MHKV.data_ptr(), *at, *sizes,
            *(one.stride(0) for one in inputs), state_MHKV.stride(0), beta_scale, bound,
            per_channel, wide, code,
        )  # fmt: skip
        return y_THV

    return gated_delta


def _supports(problem: GatedDeltaProblem) -> str | None:
    if problem.key_dim > MAX_KEY_DIM:
        return f"keys of {problem.key_dim} are above {MAX_KEY_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)

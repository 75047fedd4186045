"""Rotary position embedding by the native kernel, in place on strided views of q and k."""

from __future__ import annotations

import torch

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
from headrace.back.kernels.rope.op import Rope, RopeProblem

_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 9, INT32, INT32)


def bind_with(library: NativeLibrary, problem: RopeProblem) -> Rope:
    """The kernel of one library."""
    kernel = library.bind("rope", *_ARGUMENTS)
    rotary, element, pairs = (
        problem.rotary_dim,
        DTYPES[problem.dtype],
        int(problem.layout == "pairs"),
    )

    def rope(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, table_PR: torch.Tensor
    ) -> None:
        assert q_THD.dtype == k_TKD.dtype == problem.dtype and table_PR.dtype == torch.float32
        assert positions_T.dtype == torch.int64 and positions_T.is_contiguous()
        assert q_THD.stride(2) == k_TKD.stride(2) == 1 and table_PR.is_contiguous()
        tokens, heads, _ = q_THD.shape
        assert table_PR.shape[1] == rotary and positions_T.shape[0] == k_TKD.shape[0] == tokens
        kernel(
            q_THD.data_ptr(), k_TKD.data_ptr(), positions_T.data_ptr(), table_PR.data_ptr(),
            tokens, heads, k_TKD.shape[1], rotary, table_PR.shape[0],
            q_THD.stride(0), q_THD.stride(1), k_TKD.stride(0), k_TKD.stride(1), pairs, element,
        )  # fmt: skip

    return rope


def _supports(problem: RopeProblem) -> str | None:
    if problem.layout not in ("half", "pairs"):
        return f"knows the layouts half and pairs, not {problem.layout}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

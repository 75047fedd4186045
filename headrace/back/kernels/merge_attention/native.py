"""Merges two partial results of attention by the native kernel, in one pass over both."""

from __future__ import annotations

import torch

from headrace.back.kernels.merge_attention.op import (
    MergeAttention,
    MergeAttentionProblem,
    check_operands,
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

_ARGUMENTS = (*(POINTER,) * 4, INT64, INT64, INT32)


def bind_with(library: NativeLibrary, problem: MergeAttentionProblem) -> MergeAttention:
    """The kernel of one library."""
    kernel = library.bind("merge_attention", *_ARGUMENTS)
    element = DTYPES[problem.dtype]

    def merge(
        out_THD: torch.Tensor, lse_TH: torch.Tensor, other_THD: torch.Tensor, other_TH: torch.Tensor
    ) -> None:
        check_operands(problem, out_THD, lse_TH, other_THD, other_TH)
        kernel(
            out_THD.data_ptr(), lse_TH.data_ptr(), other_THD.data_ptr(), other_TH.data_ptr(),
            lse_TH.numel(), problem.head_dim, element,
        )  # fmt: skip

    return merge


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

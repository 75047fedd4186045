"""The op by a native kernel, over the drafter's own vocabulary: recorded steps of a CPU are made of
such."""

from __future__ import annotations

import torch

from headrace.back.kernels.draft_sample.op import DraftSample
from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.sample.op import NUMBERS


def bind_with(library: NativeLibrary, offset_D: torch.Tensor | None) -> DraftSample:
    """The kernel of one library."""
    kernel = library.bind("draft_sample", *(POINTER,) * 6, *(INT64,) * 5)
    assert offset_D is None or (offset_D.dtype == torch.int64 and offset_D.is_contiguous())

    def draft_sample(
        logits_RD: torch.Tensor,
        numbers_M: torch.Tensor,
        row_R: torch.Tensor,
        length_M: torch.Tensor,
        draft: int,
    ) -> torch.Tensor:
        assert logits_RD.dtype == torch.float32 and logits_RD.stride(1) == 1, logits_RD.stride()
        assert numbers_M.dtype == torch.int64 and numbers_M.stride() == (NUMBERS, 1)
        assert row_R.dtype == length_M.dtype == torch.int32, (row_R.dtype, length_M.dtype)
        assert offset_D is None or len(offset_D) == logits_RD.shape[1], logits_RD.shape
        rows = min(len(numbers_M), len(length_M))
        token_R = torch.empty(len(row_R), dtype=torch.int64)
        kernel(
            logits_RD.data_ptr(), None if offset_D is None else offset_D.data_ptr(),
            numbers_M.data_ptr(), row_R.data_ptr(), length_M.data_ptr(), token_R.data_ptr(),
            *logits_RD.shape, logits_RD.stride(0), rows, draft,
        )  # fmt: skip
        return token_R

    return draft_sample


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem, offset_D: bind_with(loaded(), offset_D),
    invariant=True,
)

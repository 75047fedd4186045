"""Drafts by prompt lookup, by the native kernel: one pass over each row's tokens."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.ngram_draft.op import NgramDraft, NgramDraftProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_inputs.op import StepTables

_ARGUMENTS = (*(POINTER,) * 6, *(INT64,) * 5)


def bind_with(library: NativeLibrary, problem: NgramDraftProblem) -> NgramDraft:
    """The kernel of one library."""
    kernel = library.bind("ngram_draft", *_ARGUMENTS)

    def ngram_draft(
        row_R: torch.Tensor, query_start_R1: torch.Tensor, tables: StepTables, count_M: torch.Tensor
    ) -> None:
        tokens_MC, length_M = tables.tokens_MC, tables.length_M
        assert length_M is not None and query_start_R1.shape[0] == row_R.shape[0] + 1
        assert all(t.is_contiguous() for t in (row_R, query_start_R1, tokens_MC, count_M))
        predicted = 0 if tables.predicted_M is None else tables.predicted_M.data_ptr()
        kernel(
            row_R.data_ptr(), query_start_R1.data_ptr(), tokens_MC.data_ptr(), length_M.data_ptr(),
            count_M.data_ptr(), predicted, row_R.shape[0], tokens_MC.shape[0], tokens_MC.shape[1],
            problem.min_match, problem.max_match,
        )  # fmt: skip

    return ngram_draft


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded(), problem),
)

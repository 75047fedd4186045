"""Picked tokens into the rows and the ring by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_commit.op import StepCommit
from headrace.back.kernels.step_inputs.op import StepInputsProblem, StepTables

_ARGUMENTS = (*(POINTER,) * 6, *(INT64,) * 5)


def bind_with(library: NativeLibrary, problem: StepInputsProblem) -> StepCommit:
    """The kernel of one library."""
    kernel = library.bind("step_commit", *_ARGUMENTS)
    max_rows = problem.max_rows

    def step_commit(
        words: torch.Tensor, token_R: torch.Tensor, value_R: torch.Tensor,
        tables: StepTables, ring_SXW: torch.Tensor,
    ) -> None:  # fmt: skip
        tokens_MC, length_M = tables.tokens_MC, tables.length_M
        assert token_R.dtype == torch.int64 and value_R.dtype == torch.float32, token_R.dtype
        assert ring_SXW.shape[1] == 2 and ring_SXW.shape[2] >= token_R.shape[0], ring_SXW.shape
        assert all(t.is_contiguous() for t in (token_R, value_R, tokens_MC, ring_SXW))
        kernel(
            words.data_ptr(), token_R.data_ptr(), value_R.data_ptr(), tokens_MC.data_ptr(),
            None if length_M is None else length_M.data_ptr(), ring_SXW.data_ptr(),
            token_R.shape[0], max_rows, tokens_MC.shape[1], ring_SXW.shape[0], ring_SXW.shape[2],
        )  # fmt: skip

    return step_commit


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded(), problem),
)

"""Which drafts stand, by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_inputs.op import StepInputsProblem, StepTables
from headrace.back.kernels.step_verify.op import StepVerify

_ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 5)


def bind_with(library: NativeLibrary, problem: StepInputsProblem) -> StepVerify:
    """The kernel of one library."""
    kernel = library.bind("step_verify", *_ARGUMENTS)
    max_rows = problem.max_rows

    def step_verify(
        words: torch.Tensor, token_T: torch.Tensor, value_T: torch.Tensor,
        tables: StepTables, count_M: torch.Tensor, ring_SXW: torch.Tensor,
    ) -> None:  # fmt: skip
        tokens_MC, length_M = tables.tokens_MC, tables.length_M
        assert length_M is not None and token_T.dtype == torch.int64, token_T.dtype
        assert value_T.dtype == torch.float32 and value_T.shape == token_T.shape, value_T.shape
        assert ring_SXW.shape[1] == 2 and ring_SXW.shape[2] >= token_T.shape[0], ring_SXW.shape
        assert all(t.is_contiguous() for t in (token_T, value_T, tokens_MC, count_M, ring_SXW))
        kernel(
            words.data_ptr(), token_T.data_ptr(), value_T.data_ptr(), tokens_MC.data_ptr(),
            length_M.data_ptr(), count_M.data_ptr(), ring_SXW.data_ptr(),
            token_T.shape[0], max_rows, tokens_MC.shape[1], ring_SXW.shape[0], ring_SXW.shape[2],
        )  # fmt: skip

    return step_verify


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded(), problem),
)

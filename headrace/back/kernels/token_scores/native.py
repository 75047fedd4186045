"""Log-probabilities, ranks and the most likely tokens by the native kernel: one pass over each
row."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.token_scores.op import MOST, ScoreTable, TokenScores


def bind_with(library: NativeLibrary) -> TokenScores:
    """The kernel of one library."""
    kernel = library.bind("token_scores", *(POINTER,) * 3, *(INT64,) * 5)

    def token_scores(logits_MV: torch.Tensor, token_M: torch.Tensor, scores: ScoreTable) -> None:
        assert logits_MV.dtype == torch.float32 and logits_MV.stride(1) == 1, logits_MV.stride()
        assert token_M.dtype == torch.int64 and token_M.is_contiguous(), token_M.dtype
        data, (rows, width) = scores.data, logits_MV.shape
        assert len(token_M) == len(data) == rows and data.stride(1) == 1, data.shape
        assert scores.columns - 1 <= MOST, scores.columns
        kernel(
            logits_MV.data_ptr(), token_M.data_ptr(), data.data_ptr(), rows, width,
            logits_MV.stride(0), data.stride(0), scores.columns,
        )  # fmt: skip

    return token_scores


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded()),
    invariant=True,
)

"""Pairs of tokens and experts for adapters, and their weighted sums, by the native kernels."""

from __future__ import annotations

import torch

from headrace.back.kernels.lora_pairs.op import LoraPairs, LoraPairsProblem, LoraSum, Pairs
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


def bind_pairs_with(library: NativeLibrary, problem: LoraPairsProblem) -> LoraPairs:
    """lora_pairs of one library."""
    kernel = library.bind("lora_pairs", *(POINTER,) * 7, *(INT64,) * 6, INT32)
    element = DTYPES[problem.dtype]

    def lora_pairs(
        x_TE: torch.Tensor, slot_T: torch.Tensor, expert_TK: torch.Tensor, pairs: Pairs
    ) -> None:
        tokens = len(x_TE)
        assert x_TE.shape == (tokens, problem.width) and x_TE.dtype == problem.dtype, x_TE.shape
        assert slot_T.shape == (tokens,) and expert_TK.shape == (tokens, problem.slots)
        assert slot_T.dtype == expert_TK.dtype == torch.int32, expert_TK.dtype
        assert slot_T.is_contiguous() and expert_TK.is_contiguous() and x_TE.stride(1) == 1
        kernel(
            x_TE.data_ptr(), slot_T.data_ptr(), expert_TK.data_ptr(), pairs.slot_P.data_ptr(),
            pairs.x_PE.data_ptr(), pairs.more_PI.data_ptr(), pairs.down_PE.data_ptr(), tokens,
            problem.slots, problem.experts, problem.width, problem.inner, x_TE.stride(0), element,
        )  # fmt: skip

    return lora_pairs


def bind_sum_with(library: NativeLibrary, problem: LoraPairsProblem) -> LoraSum:
    """lora_sum of one library."""
    kernel = library.bind("lora_sum", *(POINTER,) * 3, *(INT64,) * 4, INT32)
    element = DTYPES[problem.dtype]

    def lora_sum(y_TE: torch.Tensor, weight_TK: torch.Tensor, pairs: Pairs) -> None:
        tokens = len(y_TE)
        assert y_TE.shape == (tokens, problem.width) and y_TE.dtype == problem.dtype, y_TE.shape
        assert weight_TK.shape == (tokens, problem.slots) and weight_TK.dtype == torch.float32
        assert weight_TK.is_contiguous() and y_TE.stride(1) == 1
        kernel(
            y_TE.data_ptr(), pairs.down_PE.data_ptr(), weight_TK.data_ptr(), tokens, problem.slots,
            problem.width, y_TE.stride(0), element,
        )  # fmt: skip

    return lora_sum


PAIRS = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem: bind_pairs_with(loaded(), problem),
    invariant=True,
)
SUM = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=lambda problem: bind_sum_with(loaded(), problem),
    invariant=True,
)

"""Running greedy choice by the native kernel of greedy (greedy/native_greedy.cpp), which goes on from before."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary
from headrace.back.kernels.native.wrap import loaded, unsupported
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.running_greedy.op import RunningGreedy


def bind_with(library: NativeLibrary) -> RunningGreedy:
    """The kernel of one library."""
    kernel = library.bind("greedy", *(POINTER,) * 3, *(INT64,) * 4)

    def running(
        logits_NP: torch.Tensor, first: int, token_N: torch.Tensor, value_N: torch.Tensor
    ) -> None:
        assert logits_NP.dtype == torch.float32 and logits_NP.stride(1) == 1, logits_NP.stride()
        rows, width = logits_NP.shape
        assert token_N.shape == value_N.shape == (rows,), (token_N.shape, value_N.shape)
        assert token_N.dtype == torch.int64 and value_N.dtype == torch.float32
        kernel(
            logits_NP.data_ptr(), token_N.data_ptr(), value_N.data_ptr(),
            rows, width, logits_NP.stride(0), first,
        )  # fmt: skip

    return running


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded()),
    invariant=True,
)

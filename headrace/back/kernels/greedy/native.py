"""Greedy choice by the native kernel: one pass over each row."""

from __future__ import annotations

import torch

from headrace.back.kernels.greedy.op import Argmax, Greedy
from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel


def bind_with(library: NativeLibrary) -> Greedy:
    """The kernel of one library."""
    kernel = library.bind("greedy", *(POINTER,) * 3, *(INT64,) * 3)

    def greedy(logits_NV: torch.Tensor) -> Argmax:
        assert logits_NV.dtype == torch.float32 and logits_NV.stride(1) == 1, logits_NV.stride()
        rows, width = logits_NV.shape
        token_N = torch.empty(rows, dtype=torch.int64)
        value_N = torch.empty(rows, dtype=torch.float32)
        kernel(
            logits_NV.data_ptr(), token_N.data_ptr(), value_N.data_ptr(),
            rows, width, logits_NV.stride(0),
        )  # fmt: skip
        return token_N, value_N

    return greedy


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded()),
    invariant=True,
)

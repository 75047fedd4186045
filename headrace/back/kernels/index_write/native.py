"""Norm, rotation and write of an indexer's keys by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.index_write.op import IndexWrite, IndexWriteProblem, check_operands
from headrace.back.kernels.native.library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

MAX_DIM = 512
_ARGUMENTS = (*(POINTER,) * 8, *(INT64,) * 12, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: IndexWriteProblem,
    weight_I: torch.Tensor,
    bias_I: torch.Tensor,
) -> IndexWrite:
    """The kernel of one library; keeps the weights."""
    kernel = library.bind("index_write", *_ARGUMENTS)
    weight_I, bias_I = weight_I.float().contiguous(), bias_I.float().contiguous()
    element, pairs = DTYPES[problem.dtype], problem.layout == "pairs"

    def index_write(
        q_TJI: torch.Tensor,
        key_TI: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        keys: torch.Tensor,
        slot_T: torch.Tensor,
    ) -> None:
        check_operands(problem, q_TJI, key_TI, keys)
        assert positions_T.dtype == slot_T.dtype == torch.int64
        assert positions_T.is_contiguous() and slot_T.is_contiguous() and table_PR.is_contiguous()
        assert table_PR.shape[1] == problem.rotary and table_PR.dtype == torch.float32
        tensors = (q_TJI, key_TI, positions_T, table_PR, keys, slot_T, weight_I, bias_I)
        kernel(
            *(tensor.data_ptr() for tensor in tensors), q_TJI.shape[0], problem.heads,
            problem.dim, problem.rotary, problem.offset, *q_TJI.stride()[:2], key_TI.stride(0), table_PR.shape[0],
            problem.block_tokens, keys.shape[0], keys.stride(0), problem.eps, int(pairs), element,
        )  # fmt: skip

    return index_write


def _supports(problem: IndexWriteProblem) -> str | None:
    if problem.dim > MAX_DIM:
        return f"keys of {problem.dim} are above {MAX_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)

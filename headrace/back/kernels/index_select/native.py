"""Positions chosen by an indexer's scores, by the native kernel: no sort, and nothing scored where
all is chosen."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.index_select.op import IndexSelect, IndexSelectProblem
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

MAX_DIM = 512
_ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 11, INT32)


def bind_with(library: NativeLibrary, problem: IndexSelectProblem) -> IndexSelect:
    """The kernel of one library."""
    kernel, element = library.bind("index_select", *_ARGUMENTS), DTYPES[problem.dtype]
    heads, dim, top_k = problem.heads, problem.dim, problem.top_k

    def index_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, keys: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        assert q_TJI.dtype == weight_TJ.dtype == keys.dtype == problem.dtype
        assert q_TJI.shape[1:] == (heads, dim) and q_TJI.stride()[1:] == (dim, 1), q_TJI.stride()
        assert weight_TJ.shape == q_TJI.shape[:2] and weight_TJ.stride(1) == 1, weight_TJ.shape
        assert keys.stride()[1:] == (dim, 1), keys.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
        num_tokens, rows = q_TJI.shape[0], lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == rows, (starts.shape, table.shape)
        chosen_TK = q_TJI.new_empty((num_tokens, top_k), dtype=torch.int32)
        tensors = (q_TJI, weight_TJ, keys, starts, lengths, table, chosen_TK)
        kernel(
            *(tensor.data_ptr() for tensor in tensors), rows, table.stride(0), num_tokens, heads,
            dim, top_k, q_TJI.stride(0), weight_TJ.stride(0), problem.block_tokens, keys.shape[0],
            keys.stride(0), element,
        )  # fmt: skip
        return chosen_TK

    return index_select


def _supports(problem: IndexSelectProblem) -> str | None:
    if problem.dim > MAX_DIM:
        return f"keys of {problem.dim} are above {MAX_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

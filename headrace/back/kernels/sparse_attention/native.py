"""Attention over chosen positions of a cache of keys and values by the native kernel, which sums
positions in one order: a query's bits are those of the same position in any chunk of a prompt."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan
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
from headrace.back.kernels.sparse_attention.op import (
    SparseAttentionFunction,
    SparseAttentionProblem,
)

MAX_HEAD_DIM = 512
_ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 13, FLOAT, INT32)


def bind_with(library: NativeLibrary, problem: SparseAttentionProblem) -> SparseAttentionFunction:
    """The kernel of one library."""
    kernel = library.bind("sparse_attention", *_ARGUMENTS)
    shape = heads, kv_heads, head_dim = problem.heads, problem.kv_heads, problem.head_dim
    lists = (problem.lists, problem.top_k)

    def attention(
        q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TGS: torch.Tensor
    ) -> torch.Tensor:
        assert q_THD.dtype == kv.dtype == problem.dtype, (q_THD.dtype, kv.dtype)
        q_THD, chosen_TGS = q_THD.contiguous(), chosen_TGS.contiguous()
        assert q_THD.shape[1:] == (heads, head_dim), q_THD.shape
        assert kv.shape[1:] == (2, kv_heads, problem.block_tokens, head_dim), kv.shape
        assert kv.stride()[3:] == (head_dim, 1), kv.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
        num_tokens, rows = q_THD.shape[0], lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == rows, (starts.shape, table.shape)
        assert chosen_TGS.shape == (num_tokens, *lists), chosen_TGS.shape
        assert chosen_TGS.dtype == torch.int32, chosen_TGS.dtype
        out_THD = q_THD.new_empty(q_THD.shape)
        tensors = (q_THD, kv, starts, lengths, table, chosen_TGS, out_THD)
        kernel(
            *(tensor.data_ptr() for tensor in tensors), rows, table.stride(0), num_tokens, *shape,
            *lists, problem.block_tokens, kv.shape[0], kv.stride(0), kv.stride(1), kv.stride(2),
            problem.scale, DTYPES[problem.dtype],
        )  # fmt: skip
        return out_THD

    return attention


def _supports(problem: SparseAttentionProblem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"heads of {problem.head_dim} are above {MAX_HEAD_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

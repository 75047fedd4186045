"""Attention over a window of latents and entries of groups by the native kernel, which sums what a
query reads in one order: its bits are those of the same position in any chunk of a prompt."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.compressed_attention.op import CompressedAttention, CompressedProblem
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

MAX_WIDTH = 1024
_ARGUMENTS = (*(POINTER,) * 10, *(INT64,) * 14, FLOAT, INT32)


def bind_with(
    library: NativeLibrary, problem: CompressedProblem, sinks_H: torch.Tensor
) -> CompressedAttention:
    """The kernel of one library; keeps the sinks."""
    kernel = library.bind("compressed_attention", *_ARGUMENTS)
    heads, head_dim, element = problem.heads, problem.head_dim, DTYPES[problem.dtype]
    sinks_H = sinks_H.float().contiguous()
    assert sinks_H.shape == (heads,), sinks_H.shape
    counts = (problem.window, problem.group, problem.top_k, problem.block_tokens)

    def attention(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        position_T: torch.Tensor,
        entries: torch.Tensor,
        entry_plan: Plan,
        groups_TK: torch.Tensor,
    ) -> torch.Tensor:
        assert q_THD.dtype == kv.dtype == entries.dtype == problem.dtype, (q_THD.dtype, kv.dtype)
        q_THD = q_THD.contiguous()
        assert q_THD.shape[1:] == (heads, head_dim), q_THD.shape
        assert kv.stride()[1:] == entries.stride()[1:] == (head_dim, 1), kv.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        entry_table = entry_plan.block_table_RB
        whole = (starts, lengths, table, entry_table)
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in whole)
        num_tokens, rows = q_THD.shape[0], lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == entry_table.shape[0] == rows
        if problem.top_k:
            assert groups_TK.shape == (num_tokens, problem.top_k), groups_TK.shape
            assert groups_TK.dtype == torch.int32 and groups_TK.is_contiguous(), groups_TK.dtype
        out_THD = q_THD.new_empty(q_THD.shape)
        kernel(
            *(tensor.data_ptr() for tensor in (q_THD, kv, entries, *whole, groups_TK, sinks_H, out_THD)),
            rows, table.stride(0), entry_table.stride(0), num_tokens, heads, head_dim, *counts,
            kv.shape[0], entries.shape[0], kv.stride(0), entries.stride(0), problem.scale, element,
        )  # fmt: skip
        return out_THD

    return attention


def _supports(problem: CompressedProblem) -> str | None:
    if problem.head_dim > MAX_WIDTH:
        return f"latents of {problem.head_dim} are above {MAX_WIDTH}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, sinks: bind_with(loaded(), problem, sinks),
    invariant=True,
)

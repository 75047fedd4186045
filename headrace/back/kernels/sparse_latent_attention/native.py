"""Attention over chosen positions of a cache of latents by the native kernel, which sums positions
in one order: a query's bits are those of the same position in any chunk of a prompt."""

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
from headrace.back.kernels.sparse_latent_attention.op import (
    SparseLatentAttentionFunction,
    SparseLatentProblem,
)

MAX_WIDTH = 1024
_ARGUMENTS = (*(POINTER,) * 8, *(INT64,) * 10, FLOAT, INT32)


def bind_with(
    library: NativeLibrary, problem: SparseLatentProblem, sinks_H: torch.Tensor | None = None
) -> SparseLatentAttentionFunction:
    """The kernel of one library; keeps the sinks."""
    assert problem.sinks == (sinks_H is not None), problem
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    sinks = None if sinks_H is None else sinks_H.data_ptr()
    kernel = library.bind("sparse_latent_attention", *_ARGUMENTS)
    heads, rank, width, element = problem.heads, problem.rank, problem.width, DTYPES[problem.dtype]

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TK: torch.Tensor
    ) -> torch.Tensor:
        assert q_THW.dtype == kv.dtype == problem.dtype, (q_THW.dtype, kv.dtype)
        assert q_THW.is_contiguous() and q_THW.shape[1:] == (heads, width), q_THW.shape
        assert kv.stride()[1:] == (width, 1), kv.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
        num_tokens, rows = q_THW.shape[0], lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == rows, (starts.shape, table.shape)
        assert chosen_TK.shape == (num_tokens, problem.top_k), chosen_TK.shape
        assert chosen_TK.dtype == torch.int32 and chosen_TK.is_contiguous(), chosen_TK.dtype
        out_THC = q_THW.new_empty((num_tokens, heads, rank))
        tensors = (q_THW, kv, starts, lengths, table, chosen_TK, out_THC)
        assert sinks_H is None or len(sinks_H) == heads, sinks_H
        kernel(
            *(tensor.data_ptr() for tensor in tensors), sinks, rows, table.stride(0), num_tokens, heads,
            width, rank, problem.top_k, problem.block_tokens, kv.shape[0], kv.stride(0),
            problem.scale, element,
        )  # fmt: skip
        return out_THC

    return attention


def _supports(problem: SparseLatentProblem) -> str | None:
    if problem.width > MAX_WIDTH:
        return f"latents of {problem.width} are above {MAX_WIDTH}"
    if problem.quantized:
        return f"reads no quantized latents ({problem.quantized})"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, sinks=None: bind_with(loaded(), problem, sinks),
    invariant=True,
)

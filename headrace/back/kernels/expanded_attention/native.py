"""Attention over expanded keys and values by the native kernel of paged attention
(kernels/attention), a row at a time: its keys, own and rotated parts behind each other, and its
values, padded to the same size, are a cache of one block."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.attention import native
from headrace.back.kernels.attention.op import AttentionProblem, Plan, SamplePlan
from headrace.back.kernels.expanded_attention.op import (
    MIN_QUERIES,
    ExpandedAttention,
    ExpandedAttentionProblem,
)
from headrace.back.kernels.native.library import NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel

HOST_PAIRS = 96 * 96
"""Of one prompt that is long enough to be expanded (layers/latent_expansion.py)."""


def bind_with(library: NativeLibrary, problem: ExpandedAttentionProblem) -> ExpandedAttention:
    """The kernel of one library."""
    heads, own, values = problem.heads, problem.own, problem.values
    head_dim = own + problem.rotary

    def attend_row(
        q_QHD: torch.Tensor,
        key_HLN: torch.Tensor,
        rotated_LR: torch.Tensor,
        value_HLV: torch.Tensor,
    ) -> torch.Tensor:
        length = len(rotated_LR)
        cache = key_HLN.new_empty((1, 2, heads, length, head_dim))
        cache[0, 0, :, :, :own] = key_HLN
        cache[0, 0, :, :, own:] = rotated_LR
        cache[0, 1, :, :, :values] = value_HLV
        cache[0, 1, :, :, values:] = 0
        paged = AttentionProblem(
            device=problem.device,
            dtype=problem.dtype,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            block_tokens=length,
            scale=problem.scale,
        )
        return native.bind_with(library, paged)(q_QHD, cache, _row(len(q_QHD), length))

    def attention(
        q_THN: torch.Tensor,
        q_THR: torch.Tensor,
        key_HSN: torch.Tensor,
        rotated_SR: torch.Tensor,
        value_HSV: torch.Tensor,
        begin_R: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        out_THV = q_THN.new_empty((len(q_THN), heads, values))
        starts, lengths = plan.host_query_start.tolist(), plan.host_kv_len.tolist()
        for row, (length, begin) in enumerate(zip(lengths, begin_R.tolist(), strict=True)):
            first, end = starts[row : row + 2]
            if end - first < MIN_QUERIES:
                continue
            at = slice(begin, begin + length)
            q_QHD = torch.cat((q_THN[first:end], q_THR[first:end]), dim=2)
            out_QHD = attend_row(q_QHD, key_HSN[:, at], rotated_SR[at], value_HSV[:, at])
            out_THV[first:end] = out_QHD[..., :values]
        return out_THV

    return attention


def _row(queries: int, length: int) -> SamplePlan:
    """The plan of one row, whose only block is the first."""
    starts, lengths = np.array([0, queries], np.int32), np.array([length], np.int32)
    return SamplePlan(
        query_start_R1=torch.from_numpy(starts),
        kv_len_R=torch.from_numpy(lengths),
        block_table_RB=torch.zeros((1, 1), dtype=torch.int32),
        slot_T=torch.arange(length - queries, length),
        host_query_start=starts,
        host_kv_len=lengths,
        num_decodes=0,
        max_query_len=queries,
        max_kv_len=length,
    )


def _supports(problem: ExpandedAttentionProblem) -> str | None:
    head_dim = problem.own + problem.rotary
    if head_dim > native.MAX_HEAD_DIM:
        return f"heads of {head_dim} are above {native.MAX_HEAD_DIM}"
    if problem.values > head_dim:
        return f"values of {problem.values} are longer than keys of {head_dim}"
    if problem.dtype == torch.float32:
        return "in float32 the latents' products take the time that is spared behind a prefix"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem),
    host_pairs=HOST_PAIRS,
)

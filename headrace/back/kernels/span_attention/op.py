"""Bidirectional attention inside spans: what encoders do, without a KV cache.

`bind(problem)` returns `f(q_THD, k_TKD, v_TKD, starts) -> y_THD`, K KV heads, each of which serves
H / K query heads in a row. The T tokens are spans (texts) end to end; `starts` is a host sequence
of ints [R + 1], first token of each span and T. A query at position p sees every key of its span,
or with `window` w those at distances up to w on both sides (ModernBERT; Beltagy et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

SpanAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int]],
    torch.Tensor,
]


@dataclass(frozen=True, kw_only=True)
class SpanAttentionProblem:
    """`heads` H and `kv_heads` K of `head_dim` D; `scale` multiplies the scores; `window` tokens
    seen on each side, None: all."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


def bind_reference(problem: SpanAttentionProblem) -> SpanAttention:
    """torch's scaled_dot_product_attention, a call per span."""
    shared = problem.kv_heads < problem.heads

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        y_THD = torch.empty_like(q_THD)
        for begin, end in pairwise(starts):
            q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
            mask = _band(end - begin, problem.window, q_THD.device)
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=problem.scale, enable_gqa=shared
            )
            y_THD[begin:end] = y[0].transpose(0, 1)
        return y_THD

    return attend


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees, bool [length, length]; None: all."""
    if window is None or length <= window + 1:
        return None
    at = torch.arange(length, device=device)
    return (at[:, None] - at[None, :]).abs() <= window


def _sample(problem: SpanAttentionProblem) -> Sample:
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    q, k, v = (
        random_tensor(9, heads, problem.head_dim, **new)
        for heads in (problem.heads, problem.kv_heads, problem.kv_heads)
    )
    return Sample(problem=problem, weights=(), arguments=(q, k, v, [0, 1, 6, 9]))


OP: Op[SpanAttentionProblem] = Op(
    name="span_attention",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.span_attention.triton_spans:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

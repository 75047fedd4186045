"""Bidirectional attention inside spans: what encoders do, without a KV cache.

`bind(problem)` returns `f(q_THD, k_TKD, v_TKD, starts) -> y_THD`, K KV heads, each of which serves
H / K query heads in a row. The T tokens are spans (texts) end to end; `starts` is a host sequence
of ints [R + 1], first token of each span and T. A query at position p sees every key of its span,
or with `window` w those at distances up to w on both sides (ModernBERT; Beltagy et al. 2020).

With `bias_reach` W, `bind(problem, bias_HB)` takes float32 [H, 2W + 1]: what is added to the scaled
score of a key at distance d = its position - the query's, at W + d; beyond W on either side it is
the same (Raffel et al. 2020, section 2.1).
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
    seen on each side, None: all. `bias_reach`: of a position bias; 0: there is none. `softcap`: of
    scores, which does not go with a position bias; None: there is none."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    bias_reach: int = 0
    softcap: float | None = None


BIAS_BYTES = 64 << 20
"""Of a mask of biases at a time."""


def bind_reference(
    problem: SpanAttentionProblem, bias_HB: torch.Tensor | None = None
) -> SpanAttention:
    """torch's scaled_dot_product_attention, a call per span; with a position bias one per tile of
    queries."""
    shared = problem.kv_heads < problem.heads
    assert (bias_HB is not None) == bool(problem.bias_reach), problem
    assert bias_HB is None or (problem.window is None and problem.softcap is None), problem

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        y_THD = torch.empty_like(q_THD)
        for begin, end in pairwise(starts):
            q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
            if bias_HB is None:
                mask = _band(end - begin, problem.window, q_THD.device)
                if problem.softcap is not None:
                    y_THD[begin:end] = _capped(problem, q[0], k[0], v[0], mask)
                    continue
                y = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=problem.scale, enable_gqa=shared
                )
                y_THD[begin:end] = y[0].transpose(0, 1)
                continue
            tile = max(1, BIAS_BYTES // (4 * problem.heads * (end - begin)))
            for at in range(0, end - begin, tile):
                part = q[:, :, at : at + tile]
                mask = _biases(bias_HB, at, part.shape[2], end - begin).to(q.dtype)
                y = F.scaled_dot_product_attention(
                    part, k, v, attn_mask=mask, scale=problem.scale, enable_gqa=shared
                )
                y_THD[begin + at :][: part.shape[2]] = y[0].transpose(0, 1)
        return y_THD

    return attend


def _capped(
    problem: SpanAttentionProblem,
    q_HTD: torch.Tensor,
    k_KTD: torch.Tensor,
    v_KTD: torch.Tensor,
    mask_TT: torch.Tensor | None,
) -> torch.Tensor:
    """[T, H, D] of one span whose scores have a soft cap, a tile of queries at a time."""
    group, length = problem.heads // problem.kv_heads, q_HTD.shape[1]
    k_HTD, v_HTD = (x.repeat_interleave(group, 0) for x in (k_KTD, v_KTD))
    assert problem.softcap is not None
    y_THD = q_HTD.new_empty(length, problem.heads, v_KTD.shape[2])
    tile = max(1, BIAS_BYTES // (4 * problem.heads * length))
    for at in range(0, length, tile):
        scores = (q_HTD[:, at : at + tile] @ k_HTD.transpose(1, 2)).float() * problem.scale
        scores = scores.div_(problem.softcap).tanh_().mul_(problem.softcap)
        if mask_TT is not None:
            scores.masked_fill_(~mask_TT[at : at + tile], float("-inf"))
        y_THD[at : at + tile] = (scores.softmax(-1).to(q_HTD.dtype) @ v_HTD).transpose(0, 1)
    return y_THD


def _biases(bias_HB: torch.Tensor, first: int, queries: int, length: int) -> torch.Tensor:
    """[H, queries, length] of the queries from position `first` on."""
    reach = bias_HB.shape[1] // 2
    at = torch.arange(length, device=bias_HB.device)
    distance = at[None, :] - at[first : first + queries, None]
    return bias_HB[:, distance.clamp(-reach, reach) + reach]


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
    weights: tuple[torch.Tensor, ...] = ()
    if problem.bias_reach:
        shape = (problem.heads, 2 * problem.bias_reach + 1)
        weights = (random_tensor(*shape, **{**new, "dtype": torch.float32}),)
    return Sample(problem=problem, weights=weights, arguments=(q, k, v, [0, 1, 6, 9]))


OP: Op[SpanAttentionProblem] = Op(
    name="span_attention",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.span_attention.library_spans:LONG",
        "headrace.back.kernels.span_attention.triton_spans:KERNEL",
        "headrace.back.kernels.span_attention.library_spans:CUDNN",
        "headrace.back.kernels.span_attention.library_spans:FLASH",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

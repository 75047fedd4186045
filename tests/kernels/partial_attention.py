"""Attention over KV that is cut in two, each half by itself, and merged by log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from headrace.back.kernels.attention.op import AttentionFunction, AttentionProblem, SamplePlan
from headrace.back.kernels.attention.reference import bind_reference
from headrace.back.kernels.kv_write.quantized import dequantize
from headrace.back.kernels.merge_attention.op import MergeAttention, MergeAttentionProblem

Bind = Callable[..., AttentionFunction]


def halves(plan: SamplePlan, block_tokens: int) -> tuple[SamplePlan, SamplePlan]:
    """What lies before the middle block of each row's old tokens, which every query sees, and the
    rest. A row of less than two blocks has nothing in the first half."""
    old = plan.host_kv_len - np.diff(plan.host_query_start)
    cuts = old // block_tokens // 2 * block_tokens
    device, table = plan.kv_len_R.device, plan.block_table_RB
    shifted = torch.zeros_like(table)
    for row, cut in enumerate(cuts // block_tokens):
        shifted[row, : table.shape[1] - cut] = table[row, cut:]
    rest = (plan.host_kv_len - cuts).astype(np.int32)
    first = replace(
        plan, kv_len_R=torch.from_numpy(cuts.astype(np.int32)).to(device), host_kv_len=cuts,
        max_kv_len=int(cuts.max()),
    )  # fmt: skip
    second = replace(
        plan, kv_len_R=torch.from_numpy(rest).to(device), host_kv_len=rest,
        max_kv_len=int(rest.max()), block_table_RB=shifted,
    )  # fmt: skip
    return first, second


def exact(
    problem: AttentionProblem,
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    plan: SamplePlan,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exps in float32."""
    wide = replace(problem, dtype=torch.float32, quantized=None)
    if problem.quantized:
        kv = dequantize(kv, torch.float32, problem.quantized)
    lse_TH = torch.full(q_THD.shape[:2], float("nan"), device=q_THD.device)
    weights = () if sinks_H is None else (sinks_H,)
    return bind_reference(wide, *weights)(q_THD.float(), kv.float(), plan, lse_TH), lse_TH


def merged_halves(
    bind: Bind,
    merge: Callable[[MergeAttentionProblem], MergeAttention],
    problem: AttentionProblem,
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    plan: SamplePlan,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exps of both halves as one; only the second half has the sinks."""
    first, second = halves(plan, problem.block_tokens)
    partial = replace(problem, causal=False, sinks=False)
    lse_TH, other_TH = torch.full((2, *q_THD.shape[:2]), float("nan"), device=q_THD.device)
    out_THD = bind(partial)(q_THD, kv, first, lse_TH)
    weights = () if sinks_H is None else (sinks_H,)
    other_THD = bind(problem, *weights)(q_THD, kv, second, other_TH)
    empty = torch.from_numpy(np.repeat(first.host_kv_len == 0, np.diff(plan.host_query_start)))
    assert empty.any() and not empty.all(), "some rows have nothing in the first half"
    assert (out_THD.cpu()[empty] == 0).all()
    assert (lse_TH.cpu()[empty] == float("-inf")).all()
    shape = MergeAttentionProblem(
        device=problem.device, dtype=problem.dtype, heads=problem.heads, head_dim=problem.head_dim
    )
    merge(shape)(out_THD, lse_TH, other_THD, other_TH)
    return out_THD, lse_TH


def check_merged(
    bind: Bind,
    merge: Callable[[MergeAttentionProblem], MergeAttention],
    problem: AttentionProblem,
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    plan: SamplePlan,
    *,
    bound: float,
    sinks_H: torch.Tensor | None = None,
    same_bits: bool = True,
) -> None:
    """The whole and the merged halves equal the reference within `bound` of the largest value, and
    with `same_bits` the whole is the same whether log-sum-exps are asked for or not."""
    expected, expected_lse = exact(problem, q_THD, kv, plan, sinks_H)
    weights = () if sinks_H is None else (sinks_H,)
    lse_TH = torch.full(q_THD.shape[:2], float("nan"), device=q_THD.device)
    whole = bind(problem, *weights)(q_THD, kv, plan, lse_TH)
    merged = merged_halves(bind, merge, problem, q_THD, kv, plan, sinks_H)
    for out, lse in ((whole, lse_TH), merged):
        assert (out.float() - expected).abs().max() <= bound * expected.abs().max()
        assert (lse - expected_lse).abs().max() <= bound * max(1.0, expected_lse.abs().max())
    plain = bind(problem, *weights)(q_THD, kv, plan)
    assert torch.equal(plain, whole) or not same_bits

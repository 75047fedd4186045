"""Two partial results of attention as one, by their log-sum-exps.

`bind(problem)` returns `f(out_THD, lse_TH, other_THD, other_TH) -> None`, which merges the second
result into the first, in place. T query tokens, H query heads, D head_dim; outputs in `dtype`,
log-sum-exps float32, all contiguous (kernels/attention/op.py: `lse_TH`). The two saw disjoint sets
of positions, and at most one of them a sink:

    out = (out exp(lse) + other exp(other_lse)) / (exp(lse) + exp(other_lse))
    lse = log(exp(lse) + exp(other_lse))

(Dao et al. 2023, "Flash-Decoding"; Juravsky et al. 2024, "Hydragen"). A result with a log-sum-exp
of -Inf saw nothing: its values are not looked at, and where both saw nothing the result is zeros.
A sink, which has a score and no value, only takes a share: `share_beside`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

MergeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""f(out_THD, lse_TH, other_THD, other_TH)"""


@dataclass(frozen=True, kw_only=True)
class MergeAttentionProblem:
    """`dtype` is that of both outputs; `heads` H of `head_dim` D."""

    device: str
    dtype: torch.dtype
    heads: int
    head_dim: int


def check_operands(
    problem: MergeAttentionProblem,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    other_THD: torch.Tensor,
    other_TH: torch.Tensor,
) -> None:
    """Asserts shapes, dtypes and that all four are contiguous."""
    shape = (out_THD.shape[0], problem.heads, problem.head_dim)
    assert out_THD.shape == other_THD.shape == shape, (out_THD.shape, other_THD.shape, shape)
    assert lse_TH.shape == other_TH.shape == shape[:2], (lse_TH.shape, other_TH.shape)
    assert out_THD.dtype == other_THD.dtype == problem.dtype, (out_THD.dtype, other_THD.dtype)
    assert lse_TH.dtype == other_TH.dtype == torch.float32, (lse_TH.dtype, other_TH.dtype)
    assert all(x.is_contiguous() for x in (out_THD, lse_TH, other_THD, other_TH))


def bind_reference(problem: MergeAttentionProblem) -> MergeAttention:
    """The reference, in float32."""

    def merge(
        out_THD: torch.Tensor, lse_TH: torch.Tensor, other_THD: torch.Tensor, other_TH: torch.Tensor
    ) -> None:
        check_operands(problem, out_THD, lse_TH, other_THD, other_TH)
        top_TH = torch.maximum(lse_TH, other_TH)
        top_TH = top_TH.masked_fill(top_TH == float("-inf"), 0.0)
        left_TH, right_TH = (lse_TH - top_TH).exp(), (other_TH - top_TH).exp()
        total_TH = left_TH + right_TH
        lse_TH.copy_(top_TH + total_TH.log())
        merged_THD = _weighed(out_THD, left_TH) + _weighed(other_THD, right_TH)
        out_THD.copy_(merged_THD / total_TH.masked_fill(total_TH == 0, 1.0)[..., None])

    return merge


def share_beside(sink: torch.Tensor, lse_TH: torch.Tensor) -> torch.Tensor:
    """float32 [T, H, 1]: what results with these log-sum-exps weigh where a score without a value,
    float32 [H] or [T, H], takes part in their softmax too; of one that saw nothing 0."""
    return (lse_TH - sink).sigmoid()[..., None]


def _weighed(out_THD: torch.Tensor, weight_TH: torch.Tensor) -> torch.Tensor:
    """Outputs times weights in float32; zeros where the weight is."""
    weight_TH1 = weight_TH[..., None]
    return out_THD.float().masked_fill(weight_TH1 == 0, 0.0) * weight_TH1


def _sample(problem: MergeAttentionProblem) -> Sample:
    generator = sample_generator()
    new = {"device": problem.device, "generator": generator}
    shape = (5, problem.heads, problem.head_dim)
    out, other = (random_tensor(*shape, dtype=problem.dtype, **new) for _ in range(2))
    lse, other_lse = (random_tensor(*shape[:2], dtype=torch.float32, **new) for _ in range(2))
    lse[1], other_lse[2], lse[3], other_lse[3] = (float("-inf"),) * 4
    out[1] = float("nan")
    return Sample(problem=problem, weights=(), arguments=(out, lse, other, other_lse))


OP: Op[MergeAttentionProblem] = Op(
    name="merge_attention",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.merge_attention.native:KERNEL",
        "headrace.back.kernels.merge_attention.triton_merge_attention:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

"""Two partial results as one: the reference against the formula, and what saw nothing."""

from __future__ import annotations

import pytest
import torch

from headrace.back.kernels.merge_attention.op import (
    MergeAttention,
    MergeAttentionProblem,
    bind_reference,
    share_beside,
)

INF, NAN = float("inf"), float("nan")


def check_merge(merge: MergeAttention, problem: MergeAttentionProblem, bound: float) -> None:
    """Against the formula in float64; results that saw nothing hold NaN."""
    generator = torch.Generator().manual_seed(4)
    shape = (9, problem.heads, problem.head_dim)
    out, other = (
        torch.randn(*shape, generator=generator).to(problem.dtype).to(problem.device) for _ in "ab"
    )
    lse, other_lse = (
        torch.randn(*shape[:2], generator=generator).mul(3).to(problem.device) for _ in "ab"
    )
    lse[1], out[1] = -INF, NAN
    other_lse[2], other[2] = -INF, NAN
    lse[3], other_lse[3], out[3], other[3] = -INF, -INF, NAN, NAN
    lse[4], other_lse[4] = 5e4, -5e4
    lse[5], other_lse[5] = -9e4, -9e4
    weights = torch.stack((lse, other_lse)).double().softmax(0).nan_to_num(0.0)[..., None]
    values = torch.stack((out, other)).double().masked_fill(weights == 0, 0.0)
    expected, expected_lse = (weights * values).sum(0), lse.double().logaddexp(other_lse.double())
    merge(out, lse, other, other_lse)
    assert (out.double() - expected).abs().max() <= bound * expected.abs().max()
    assert (out[3] == 0).all() and (lse[3] == -INF).all()
    seen = expected_lse.isfinite()
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_equals_the_formula(dtype: torch.dtype) -> None:
    problem = MergeAttentionProblem(device="cpu", dtype=dtype, heads=3, head_dim=20)
    check_merge(bind_reference(problem), problem, {torch.float32: 1e-6}.get(dtype, 1e-2))


def test_a_lost_log_sum_exp_shows() -> None:
    problem = MergeAttentionProblem(device="cpu", dtype=torch.float32, heads=1, head_dim=4)
    out, other = torch.ones(2, 1, 4), torch.ones(2, 1, 4)
    lse, other_lse = torch.tensor([[NAN], [0.0]]), torch.zeros(2, 1)
    bind_reference(problem)(out, lse, other, other_lse)
    assert out[0].isnan().all() and lse[0].isnan().all() and out[1].isfinite().all()


def test_a_score_without_a_value_takes_its_share() -> None:
    scores, values = torch.randn(3, 2, 7), torch.randn(3, 2, 7, 4)
    sinks = torch.tensor([0.3, -1.0])
    all_scores = torch.cat((scores, sinks[None, :, None].expand(3, 2, 1)), dim=2)
    expected = (all_scores.softmax(2)[..., :7, None] * values).sum(2)
    out, lse = (scores.softmax(2)[..., None] * values).sum(2), scores.logsumexp(2)
    for sink in (sinks, sinks.expand(3, 2)):
        assert torch.allclose(out * share_beside(sink, lse), expected, atol=1e-6)
    assert not share_beside(sinks, torch.full((3, 2), -INF)).any()

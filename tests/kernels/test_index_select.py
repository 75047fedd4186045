"""Which positions an indexer's scores choose: ties, short rows, and what lies behind a row."""

from __future__ import annotations

import pytest
import torch

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.index_select import op
from headrace.back.kernels.index_select.op import IndexSelectProblem, best_positions

PROBLEM = IndexSelectProblem(
    device="cpu", dtype=torch.float32, heads=3, dim=8, top_k=5, block_tokens=4
)


def test_the_best_are_those_of_topk_in_rising_order_up_to_the_query() -> None:
    """KRN-04: the set of torch.topk; -1 behind where there are fewer."""
    score_QS = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    best_QK = best_positions(score_QS, torch.arange(3, 9)[:, None], 5)
    for query, best in enumerate(best_QK.tolist()):
        seen = score_QS[query, : query + 4]
        expected = sorted(seen.topk(min(5, len(seen)))[1].tolist())
        assert best == expected + [-1] * (5 - len(expected))


def test_of_equal_scores_the_lower_positions_are_chosen() -> None:
    score_QS = torch.tensor([[1.0, 2.0, 1.0, 1.0, 3.0, 1.0]])
    assert best_positions(score_QS, torch.tensor([[5]]), 4).tolist() == [[0, 1, 2, 4]]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_stands_behind_a_row_changes_nothing(poison: float) -> None:
    """KRN-05, REG-033."""
    plan, blocks = sample_plan([(1, 6), (3, 9)], block_tokens=4, window=None, device="cpu")
    generator = torch.Generator().manual_seed(4)
    q_TJI, weight_TJ = (torch.randn(4, *rest, generator=generator) for rest in ((3, 8), (3,)))
    keys = torch.randn(blocks, 4, 8, generator=generator)
    select = op.OP.choose(PROBLEM).bind()
    chosen_TK = select(q_TJI, weight_TJ, keys, plan)
    for row, length in ((0, 6), (1, 9)):
        keys[plan.block_table_RB[row, length // 4], length % 4 :] = poison
    keys[0] = poison
    assert torch.equal(select(q_TJI, weight_TJ, keys, plan), chosen_TK)

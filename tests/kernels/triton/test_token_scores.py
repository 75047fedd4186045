"""Token scores in Triton against their definition (in the interpreter and on a GPU, as test_kernels.py)."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.token_scores import op, triton_token_scores
from headrace.back.kernels.triton.wrap import counters, interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
DEVICE = "cpu" if interpreted() else "cuda"
PROBLEM = op.TokenScoresProblem(device=DEVICE)
WIDTHS = [1, 31, 4096, 4099] if interpreted() else [1, 31, 4096, 4099, 151936, 500_009]
INF, NAN = float("inf"), float("nan")


def logits_of(width: int) -> torch.Tensor:
    """Usual, tied, equal, mostly masked, far below zero, zeros of both signs, infinite, with a NaN of either sign, all
    masked; rows with a gap between them."""
    generator = torch.Generator().manual_seed(width)
    x = torch.full((10, width + 5), NAN)[:, :width]
    x[:] = 3 * torch.randn(10, width, generator=generator)
    x[1] = x[1].round()
    x[2] = 1.5
    x[3, 2:] = -INF
    x[4] -= 300.0
    x[5] = torch.where(torch.rand(width, generator=generator) < 0.5, 0.0, -0.0)
    x[6, width // 2] = INF
    x[7, width // 3], x[8, width // 2] = NAN, -torch.tensor(NAN)
    x[9] = -INF
    return x


def told(bind, logits: torch.Tensor, token: torch.Tensor, count: int) -> op.ScoreTable:
    """Filled with what must not stay."""
    table = op.ScoreTable.empty(len(token), 1 + count, logits.device)
    table.data.fill_(-77)
    bind(op.TokenScoresProblem(device=logits.device.type))(logits, token, table)
    return op.ScoreTable(table.data.cpu())


@pytest.mark.parametrize("count", [0, 1, 5, 16, op.MOST])
@pytest.mark.parametrize("width", WIDTHS)
def test_ids_ranks_and_values_are_the_definitions(width: int, count: int) -> None:
    """KRN-02: ties within a chunk and across chunks, the lowest id first."""
    count = min(count, width)
    logits = logits_of(width)
    token = torch.randint(width, (10,), generator=torch.Generator().manual_seed(1))
    ours = told(triton_token_scores.bind, logits.to(DEVICE), token.to(DEVICE), count)
    wanted = told(op.bind_reference, logits, token, count)
    assert torch.equal(ours.ids, wanted.ids)
    assert torch.equal(ours.ranks, wanted.ranks)
    for mine, theirs in (
        (ours.log_sum_exp, wanted.log_sum_exp),
        (ours.values, wanted.values),
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=4e-6, equal_nan=True)
    exact = logits[:6].double().log_softmax(1).gather(1, wanted.ids[:6].long())
    torch.testing.assert_close(ours.values[:6].double(), exact, rtol=1e-6, atol=4e-5)


def test_a_rows_bits_are_its_own() -> None:
    """ENG-05: whatever rows are beside it and however many alternatives they ask for; and nothing is left behind."""
    logits = logits_of(5003).to(DEVICE)
    token = torch.arange(10, device=DEVICE) * 500
    together = told(triton_token_scores.bind, logits, token, 7)
    for row in range(10):
        one = slice(row, row + 1)
        for count in (7, 2):
            alone = told(triton_token_scores.bind, logits[one], token[one], count)
            for field in ("ids", "values"):
                left, right = getattr(alone, field), getattr(together, field)[one, : 1 + count]
                assert left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
            assert torch.equal(alone.ranks, together.ranks[one])
            assert torch.equal(alone.data[:, -1], together.data[one, -1])
    assert not counters(logits.device).any()


def test_no_rows_are_none() -> None:
    empty = torch.empty((0, 40), device=DEVICE)
    table = told(triton_token_scores.bind, empty, torch.empty(0, dtype=torch.int64), 3)
    assert table.ids.shape == (0, 4)

"""An output head whose vocabulary ranks share chooses what one rank does, and gathers pairs for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.parallel.mesh import Mesh
from tests.back.parallel.head_rank import CASES, chosen
from tests.rank_processes import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_choose_the_tokens_of_one(ranks: int, tmp_path: Path) -> None:
    """Ties within a rank and across borders go to the lowest id, a NaN counts as the greatest."""
    run_ranks("tests.back.parallel.head_rank", ranks, tmp_path)
    alone = chosen(Mesh())
    for rank in range(ranks):
        for case, one, ours in zip(
            CASES, alone, torch.load(tmp_path / f"{ranks}-{rank}.pt"), strict=True
        ):
            for expected, value in zip(one, ours, strict=True):
                assert torch.equal(expected.nan_to_num(1e9), value.nan_to_num(1e9)), (case, rank)

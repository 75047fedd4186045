"""Two ranks over gloo see what one does: every rank computes the whole tower, the decoder is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.back.parallel.mesh import Mesh
from tests.models import test_qwen_vl as qwen
from tests.models import test_towers as towers
from tests.models.media import scored_by_runner
from tests.models.media_rank import CHUNK, prompts_of
from tests.rank_processes import run_ranks

BOUND = 1e-4


@pytest.mark.timeout(300)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    for module in (qwen, towers):
        for name, case in module.CASES.items():
            module.save_case(case, tmp_path / name)
    folders = [tmp_path / name for name in (*qwen.CASES, *towers.CASES)]
    run_ranks("tests.models.media_rank", 2, tmp_path / "store", *folders)
    for folder in folders:
        alone = scored_by_runner(folder, prompts_of(folder.name), mesh=Mesh(), chunk=CHUNK)
        for rank in range(2):
            for ours, whole in zip(torch.load(folder / f"rank{rank}.pt"), alone, strict=True):
                assert np.abs(ours.numpy() - np.stack(whole)).max() < BOUND, folder.name

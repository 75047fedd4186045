"""Two ranks over gloo see what one does: every rank computes the whole tower, the decoder is split."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.back.parallel.mesh import Mesh
from headrace.base import env
from tests.models import test_qwen_vl as qwen
from tests.models import test_towers as towers
from tests.models.media import scored_by_runner
from tests.models.media_rank import CHUNK, prompts_of

BOUND = 1e-4


@pytest.mark.timeout(300)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    for module in (qwen, towers):
        for name, case in module.CASES.items():
            module.save_case(case, tmp_path / name)
    folders = [tmp_path / name for name in (*qwen.CASES, *towers.CASES)]
    command = [sys.executable, "-m", "tests.models.media_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), *map(str, folders)],
            env=env.child_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    for folder in folders:
        alone = scored_by_runner(folder, prompts_of(folder.name), mesh=Mesh(), chunk=CHUNK)
        for rank in range(2):
            for ours, whole in zip(torch.load(folder / f"rank{rank}.pt"), alone, strict=True):
                assert np.abs(ours.numpy() - np.stack(whole)).max() < BOUND, folder.name

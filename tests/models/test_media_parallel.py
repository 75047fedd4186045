"""Two ranks over gloo see what one does: every rank computes the whole tower, the decoder is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.back.layers.vision.shared_encoder import shares
from headrace.back.parallel.mesh import Mesh
from tests.models import test_qwen_vl as qwen
from tests.models import test_towers as towers
from tests.models.media import save_media_oracle, scored_by_runner
from tests.models.media_rank import CHUNK, LONG, many_images_of, prompts_of
from tests.models.test_pictures import CASES as PICTURES
from tests.rank_processes import run_ranks

BOUND = 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    """What is split is the decoder, which has tests of its own in `make test`."""
    names = [*qwen.CASES, *towers.CASES]
    for name in names:
        module = qwen if name in qwen.CASES else towers
        module.save_case(module.CASES[name], tmp_path / name)
    folders = [tmp_path / name for name in names]
    run_ranks("tests.models.media_rank", 2, tmp_path / "store", *folders)
    for folder in folders:
        alone = scored_by_runner(folder, prompts_of(folder.name), mesh=Mesh(), chunk=CHUNK)
        for rank in range(2):
            for ours, whole in zip(torch.load(folder / f"rank{rank}.pt"), alone, strict=True):
                assert np.abs(ours.numpy() - np.stack(whole)).max() < BOUND, folder.name


SPLIT = (
    "ernie4.5-vl", "cosmos3-edge", "hyperclovax-vision", "llama4", "nemotron-omni", "ovis2",
    "gemma4", "minimax-m3",
)  # fmt: skip
"""Families that see windows of 2 x 2 patches of any grid; of ERNIE 4.5 VL a step takes two mixtures, MiniMax-M3's
indexer chooses for the KV heads of all ranks."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_split_the_decoders_of_further_families(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in SPLIT]
    for folder in folders:
        folder.mkdir()
        config, oracle_class = PICTURES[folder.name].build(folder)
        save_media_oracle(oracle_class, config, folder)
    run_ranks("tests.models.media_rank", 2, tmp_path / "store", *folders)
    for folder in folders:
        alone = scored_by_runner(folder, prompts_of(folder.name), mesh=Mesh(), chunk=CHUNK)
        for rank in range(2):
            for ours, whole in zip(torch.load(folder / f"rank{rank}.pt"), alone, strict=True):
                assert np.abs(ours.numpy() - np.stack(whole)).max() < BOUND, folder.name


SHARED = ("internvl", "qwen3-vl")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "shared", [SHARED[1:], pytest.param(SHARED[:1], marks=pytest.mark.slow)], ids=" ".join
)
def test_ranks_that_share_out_images_give_the_same(shared: tuple[str, ...], tmp_path: Path) -> None:
    """MOD-02: one to seven images over two ranks, in one step: uneven shares, rows of every rank are those of one."""
    cases = {**qwen.CASES, **towers.CASES}
    for name in shared:
        module = qwen if name in qwen.CASES else towers
        module.save_case(cases[name], tmp_path / name)
    folders = [tmp_path / name for name in shared]
    run_ranks("tests.models.media_rank", 2, tmp_path / "store", "--shared", *folders)
    for folder in folders:
        prompts = many_images_of(folder.name)
        alone = scored_by_runner(folder, prompts, mesh=Mesh(), chunk=LONG)
        for rank in range(2):
            for ours, whole in zip(torch.load(folder / f"rank{rank}.pt"), alone, strict=True):
                assert np.abs(ours.numpy() - np.stack(whole)).max() < BOUND, folder.name


def test_the_largest_inputs_go_to_the_idlest_rank() -> None:
    assert shares([5, 1, 1, 9, 1], 2) == [[3], [0, 1, 2, 4]]
    assert shares([4], 3) == [[0], [], []]

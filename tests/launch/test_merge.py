"""`headrace merge-adapter`: the written checkpoint has the logits of the model with its adapter (ENG-20)."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from headrace.base.errors import CheckpointError, ConfigError
from headrace.cli.merge_adapter import main
from headrace.launch.merge import merge_adapter
from tests.back.lora.adapters import merge, module_sizes, write_adapter
from tests.back.lora.test_applied import spec_of
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import compare, tiny_config


@pytest.mark.parametrize("case", ["qwen3", "phi3"])
def test_what_is_written_has_the_logits_of_the_base_with_its_adapter(
    case: str, tmp_path: Path
) -> None:
    """Of separate projections and of fused ones."""
    oracle = save_oracle(tiny_config(case), tmp_path / "base")
    sizes = module_sizes(load_ours(spec_of(tmp_path / "base")))
    adapter = write_adapter(tmp_path / "adapter", sizes, use_rslora=True)
    merged = merge_adapter(model_spec(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out")
    assert merged.num_matrices == len(sizes) and merged.rank == 4
    other = copy.deepcopy(oracle)
    merge(other, adapter)
    rows = random_rows(97, (21, 9))
    ours = load_ours(model_spec(tmp_path / "out"))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(other, rows), 1e-4)


def test_an_adapter_of_another_base_and_a_folder_that_is_full_are_refused(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path / "base")
    write_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (7, 5)})
    spec = model_spec(tmp_path / "base")
    with pytest.raises(CheckpointError, match="of this base and rank 4 it is"):
        merge_adapter(spec, tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ConfigError, match="not an empty folder"):
        merge_adapter(spec, tmp_path / "adapter", tmp_path / "base")
    with pytest.raises(ConfigError, match="name all three"):
        main(["somewhere"])

"""Latent attention in its three forms has the same logits: absorbed as our kernels compute it, expanded as
transformers does, and sparse with a choice of all positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, YARN, compare, rope, tiny_config

ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": rope(**YARN, mscale=1.0, mscale_all_dim=0.7),
}


def logits(folder: Path, **changes: Any) -> list[torch.Tensor]:
    spec = msgspec.structs.replace(model_spec(folder), **changes)
    rows = random_rows(spec.logits_width, LENGTHS)
    return teacher_forced(load_ours(spec), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    "family", ["deepseek-v3", pytest.param("deepseek-v2", marks=pytest.mark.slow)]
)
def test_absorbed_and_expanded_attention_agree(family: str, kind: str, tmp_path: Path) -> None:
    """MOD-09, MOD-06, REG-047: with latents in the cache, and with heads that the fallback makes of them."""
    config = tiny_config(family)
    for key, value in ROPES[kind].items():
        setattr(config, key, value)
    save_oracle(config, tmp_path)
    compare(logits(tmp_path), logits(tmp_path, family="transformers"), 1e-4)


def test_a_choice_of_all_positions_is_dense_attention(tmp_path: Path) -> None:
    """MOD-16: as many positions chosen as there are give the attention of the model without an indexer."""
    config = tiny_config("deepseek-v3.2")
    config.index_topk = max(LENGTHS)
    save_oracle(config, tmp_path)
    sparse = logits(tmp_path)
    file, written = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    dense = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    assert len(dense) < len(tensors)
    save_file(dense, file)
    raw = json.loads(written.read_text())
    raw = {key: value for key, value in raw.items() if not key.startswith("index_")}
    raw |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    written.write_text(json.dumps(raw))
    compare(logits(tmp_path), sparse, 1e-4)

"""Sarvam, which no library has a class for: with experts against an independent reference, with latent attention
against DeepSeek-V3's class under Sarvam's names of the keys (MOD-06)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, SIZES, YARN, compare, tiny_config
from tests.references import sarvam_moe

RENAMED = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def test_experts_have_the_logits_of_the_reference(tmp_path: Path) -> None:
    config = sarvam_moe.CONFIG
    weights = sarvam_moe.tensors(config)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = random_rows(config["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, [sarvam_moe.logits(config, weights, row) for row in rows], 1e-4)


def test_latents_have_the_logits_of_deepseek(tmp_path: Path) -> None:
    """The scaling is called deepseek_yarn there."""
    oracle = save_oracle(tiny_config("deepseek-v3"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {RENAMED.get(key, key): value for key, value in config.items()}
    assert config["rope_parameters"]["factor"] == YARN["factor"]
    config["rope_parameters"]["rope_type"] = "deepseek_yarn"
    config |= {"architectures": ["SarvamMLAForCausalLM"], "model_type": "sarvam_mla"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)

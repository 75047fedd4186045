"""Text parts of mixtures that see or hear as published, which transformers has no class for (MOD-02)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import test_published_names as published
from tests.models.oracle import (
    BLOCK_TOKENS,
    load_ours,
    model_spec,
    oracle_logits,
    save_oracle,
)
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, SIZES, compare, tiny_config
from tests.references import step3


def hold(
    folder: Path, config: dict[str, Any], within: str = "", others: tuple[str, ...] = ()
) -> None:
    """The checkpoint with its tensors below `within`, beside those of other parts."""
    tensors = {within + name: one for name, one in load_file(folder / "model.safetensors").items()}
    tensors |= {name: torch.zeros(2, 2) for name in others}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def agree(folder: Path, rows: list[list[int]], theirs: list[torch.Tensor]) -> None:
    ours = load_ours(model_spec(folder))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        "deepseek-v2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("deepseek-v3", "deepseek-moe")),
    ],
)
def test_deepseek_vl2_has_the_logits_of_its_text_model(case: str, tmp_path: Path) -> None:
    """Its config.json names no architecture, nor what has the defaults of DeepSeek V2's class."""
    if case == "deepseek-moe":
        oracle = published.publish(case, tmp_path)
        changes: dict[str, Any] = {"use_mla": False, "kv_lora_rank": None}
    else:
        oracle = save_oracle(tiny_config(case), tmp_path)
        changes = {"topk_method": "noaux_tc"} if case == "deepseek-v3" else {}
    text = json.loads((tmp_path / "config.json").read_text()) | changes
    text |= {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    others = ("vision.pos_embed", "projector.layers.0.weight", "image_newline", "view_seperator")
    hold(tmp_path, {"model_type": "deepseek_vl_v2", "language_config": text}, "language.", others)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    agree(tmp_path, rows, oracle_logits(oracle, rows))


@pytest.mark.slow
def test_step_3_has_the_logits_of_its_text_model(tmp_path: Path) -> None:
    weights = step3.tensors(step3.CONFIG)
    save_file(weights, tmp_path / "model.safetensors")
    text = {key: value for key, value in step3.CONFIG.items() if key != "model_type"}
    whole = {"architectures": ["Step3VLForConditionalGeneration"], "text_config": text}
    others = (
        "vision_model.class_embedding",
        "vit_downsampler2.weight",
        "vit_large_projector.weight",
    )
    hold(tmp_path, whole | {"model_type": "step3_vl"}, others=others)
    rows = random_rows(97, LENGTHS)
    wide = {name: one.double() for name, one in weights.items()}
    agree(tmp_path, rows, [step3.logits(step3.CONFIG, wide, row).float() for row in rows])


@pytest.mark.slow
def test_mimo_v2_omni_has_the_logits_of_its_text_model(tmp_path: Path) -> None:
    oracle = published.publish("mimo-v2", tmp_path, architectures=["MiMoV2OmniForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    others = ("model.mtp.layers.0.eh_proj.weight", "visual.merger.weight", "audio_encoder.weight")
    hold(tmp_path, config, others=(*others, "speech_embeddings.0.weight"))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    agree(tmp_path, rows, oracle_logits(oracle, rows))

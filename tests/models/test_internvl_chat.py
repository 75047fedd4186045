"""InternVL under its authors' names and keys sees as the converted one does in transformers (MUL-03)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.media import SeeingEngine, compare_answers
from tests.models.test_towers import CASES, Seen, save_case, two_images

NAMES = (
    (
        "vision_tower.embeddings.patch_embeddings.projection",
        "vision_model.embeddings.patch_embedding",
    ),
    ("vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
    ("vision_tower.embeddings.position_embeddings", "vision_model.embeddings.position_embedding"),
    ("vision_tower.encoder.layer.", "vision_model.encoder.layers."),
    ("multi_modal_projector.layer_norm", "mlp1.0"),
    ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
    (".attention.projection_layer", ".attn.proj"),
    (".attention.", ".attn."),
    (".layernorm_before", ".norm1"),
    (".layernorm_after", ".norm2"),
    (".lambda_", ".ls"),
)


def as_published(folder: Path) -> None:
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in NAMES:
            name = name.replace(old, new) if not name.startswith("language_model") else name
        tensors[name] = tensor
    merged = [name for name in tensors if name.endswith(".attn.q_proj.weight")]
    for name in merged:
        parts = [tensors.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        tensors[name.replace("q_proj", "qkv")] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text, vision = config.pop("text_config"), config.pop("vision_config")
    vision |= {"image_size": 16, "patch_size": 4, "qk_normalization": True, "qkv_bias": False}
    config |= {
        **{"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"},
        **{"llm_config": text, "vision_config": vision, "select_layer": -1, "ps_version": "v2"},
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["InternVLChatModel", "SkyworkR1VChatModel"])
def test_images_as_published(name: str, tmp_path: Path) -> None:
    oracle = save_case(CASES["internvl"], tmp_path)
    as_published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    engine = SeeingEngine(tmp_path)
    seen = Seen(case=CASES["internvl"], folder=tmp_path, oracle=oracle, engine=engine)
    prompt = two_images(seen)
    compare_answers(engine.run(prompt)[0], seen.expected(prompt))
    engine.close()

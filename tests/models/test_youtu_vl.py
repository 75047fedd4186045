"""Youtu-VL (MOD-02), which transformers has the text of alone: an independent reference of its eyes, windows among
their layers, before transformers' Youtu."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from headrace.base.errors import CheckpointError
from headrace.front.media.processors.youtu import YoutuProcessor
from tests.front.media.pictures import picture
from tests.models.oracle import load_ours, model_spec, randomize, save_oracle
from tests.models.sight import IMAGE, agree, read_spec, values_of, write_checkpoint
from tests.models.test_parity import tiny_config
from tests.references import youtu_vl

PATCH = 4
MARK = IMAGE - 10
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "patch_size": PATCH},
    **{"num_attention_heads": 2, "spatial_merge_size": 2, "window_size": 16},
    **{"fullatt_block_indexes": [1], "model_type": "siglip2_vision_model"},
}


def checkpoint(folder: Path, **vision: Any) -> tuple[Any, youtu_vl.Eyes]:
    decoder = save_oracle(tiny_config("youtu"), folder)
    text = json.loads((folder / "config.json").read_text())
    torch.manual_seed(5)
    eyes = youtu_vl.Eyes(VISION, text["hidden_size"]).eval()
    randomize(eyes)
    unread = {"siglip2.vision_model.embeddings.position_embedding.weight": torch.zeros(2, 2)}
    config = {
        **text,
        **{"architectures": ["YoutuVLForConditionalGeneration"], "model_type": "youtu_vl"},
        **{"vision_config": {**VISION, **vision}, "image_token_id": MARK},
    }
    tensors = {**load_file(folder / "model.safetensors"), **eyes.state_dict(), **unread}
    write_checkpoint(folder, tensors, config)
    return decoder, eyes


def test_pictures_are_seen_as_by_the_reference(tmp_path: Path) -> None:
    """Both are wider or higher than a window of 2 x 2 merged ones."""
    decoder, eyes = checkpoint(tmp_path)
    pictures, rows = [picture(39, 22, 0), picture(15, 33, 1)], []
    for one in pictures:
        size = tuple(math.ceil(side / 8) * 8 for side in one.size)
        with torch.inference_mode():
            rows.append(eyes(values_of(one.resize(size, Image.Resampling.BILINEAR))))
    agree(tmp_path, decoder, pictures, torch.cat(rows))


def test_a_picture_of_too_many_patches_shrinks_by_steps(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    spec = read_spec(tmp_path)
    processor = YoutuProcessor(spec.settings)
    for width, height in ((3000, 2000), (9, 1), (768, 768), (100_000, 3)):
        assert processor.size_of(height, width) == reference_size(width, height)[::-1]


def reference_size(width: int, height: int) -> tuple[int, int]:
    scale = 1.0
    while True:
        wide, high = (max(8, int(math.ceil(n * scale / 8) * 8)) for n in (width, height))
        if wide / PATCH * (high / PATCH) <= 36_864:
            return wide, high
        scale -= 0.02


@pytest.mark.parametrize(("key", "value"), [("window_size", 7), ("out_hidden_size", 7)])
def test_what_is_not_read_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path, **{key: value})
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == key

"""HyperCLOVA X SEED Vision (MOD-02), which transformers has no class for: an independent reference between SigLIP and a
Llama; padded squares, tiles without their padding."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from headrace.base.errors import CheckpointError
from tests.front.media.pictures import picture
from tests.models.oracle import load_ours, model_spec, randomize
from tests.models.sight import IMAGE, agree, read_spec, values_of, write_checkpoint
from tests.models.test_towers import TEXT, TOWER
from tests.references.hcx_vision import Between

SIDE, PATCH, WINDOWS = 24, 4, 2
"""Six patches a side, in windows of 3 x 3."""
VISION = {**TOWER, "image_size": SIDE, "model_type": "siglip_vision_model"}
SIZES = [[24, 24], [24, 48], [48, 24], [24, 72], [48, 48]]
GREY = (127, 127, 127)
Parts = tuple[Any, Any, Between]


def checkpoint(folder: Path, **keys: Any) -> Parts:
    tower = transformers.SiglipVisionConfig(**{**VISION, "vision_use_head": False})
    text = transformers.LlamaConfig(**TEXT, tie_word_embeddings=False)
    for config in (tower, text):
        config._attn_implementation = "eager"
    torch.manual_seed(5)
    sees, reads = transformers.SiglipVisionModel(tower).eval(), transformers.LlamaForCausalLM(text)
    between = Between(VISION["hidden_size"], text.hidden_size, SIDE // PATCH, WINDOWS).eval()
    tensors: dict[str, torch.Tensor] = {}
    for part, at in (
        (sees, "vision_model.vision_model."),
        (reads.eval(), "language_model."),
        (between, ""),
    ):
        randomize(part, seed=7)
        state = part.state_dict().items()
        tensors |= {at + name.removeprefix("vision_model."): one for name, one in state}
    config = {
        **{"architectures": ["HCXVisionForCausalLM"], "model_type": "hyperclovax_vlm"},
        **{"anyres": True, "unpad": True, "mm_projector_type": "cabstractor", "use_nth_layer": -2},
        **{"num_queries_vis_abstractor_image": WINDOWS**2, "possible_resolutions": SIZES},
        **{"img_start_id": IMAGE, "vision_config": VISION, "proj_prenorm": False},
        "language_config": json.loads(text.to_json_string()),
        **keys,
    }
    files = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "pad_to_square": True}
    write_checkpoint(folder, tensors, config, files={"preprocessor_config": files})
    return sees, reads, between


def padded(one: Image.Image, width: int, height: int) -> torch.Tensor:
    scale = min(width / one.width, height / one.height)
    size = (min(width, math.ceil(one.width * scale)), min(height, math.ceil(one.height * scale)))
    ground = Image.new("RGB", (width, height), GREY)
    small = one.resize(size, Image.Resampling.BICUBIC)
    ground.paste(small, ((width - size[0]) // 2, (height - size[1]) // 2))
    return values_of(ground)


def rows_of(parts: Parts, one: Image.Image, width: int, height: int) -> torch.Tensor:
    sees, _, between = parts
    across, down = width // SIDE, height // SIDE
    tiles = padded(one, width, height).unflatten(1, (down, SIDE)).unflatten(3, (across, SIDE))
    squares = [padded(one, SIDE, SIDE)[None], tiles.permute(1, 3, 0, 2, 4).flatten(0, 1)]
    with torch.inference_mode():
        states = sees(torch.cat(squares), output_hidden_states=True).hidden_states[-2]
        rows: torch.Tensor = between(
            states[0], states[1:].unflatten(0, (down, across)), (one.width, one.height)
        )
    return rows


def test_pictures_are_seen_as_by_the_reference(tmp_path: Path) -> None:
    """Of the first one's windows two rows are padding; the second one is too flat for any."""
    parts = checkpoint(tmp_path)
    pictures = [picture(60, 41, 0), picture(80, 13, 1)]
    sizes = ((48, 48), (72, 24))
    rows = [rows_of(parts, one, *size) for one, size in zip(pictures, sizes, strict=True)]
    agree(tmp_path, parts[1], pictures, torch.cat(rows))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("mm_projector_type", "linear"), ("anyres", False), ("use_nth_layer", 1)),
        *(("num_queries_vis_abstractor_image", 16), ("possible_resolutions", [[24, 30]])),
    ],
)
def test_what_is_not_read_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path, **{key: value})
    with pytest.raises(CheckpointError) as caught:
        read_spec(tmp_path)
        load_ours(model_spec(tmp_path))
    assert caught.value.field == key

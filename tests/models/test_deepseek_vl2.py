"""DeepSeek-VL2 (MOD-02), which transformers has no class for: an independent reference of its eyes before the decoders
that it does have; its squares by ImageOps, its text parts of three kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file

from headrace.base.errors import CheckpointError, InvalidRequest
from tests.front.media.pictures import picture
from tests.models import test_published_names as published
from tests.models.oracle import load_ours, model_spec, randomize, save_oracle
from tests.models.sight import agree, processed, read_spec, values_of, write_checkpoint
from tests.models.test_parity import tiny_config
from tests.references import deepseek_vl2

VISION: dict[str, Any] = {
    **{"image_size": 22, "patch_size": 4, "width": 32, "layers": 2, "heads": 2, "mlp_ratio": 1.7},
    "model_type": "vision",
}
"""Five patches a side, of which the last row and column of windows have one, and two pixels that nobody sees."""
SIZES = ((22, 22), (44, 22), (22, 44), (66, 22))
GREY = (127, 127, 127)
MARK = 90


def checkpoint(folder: Path, kind: str = "deepseek-v2", **keys: Any) -> tuple[Any, Any]:
    """The decoder, and the eyes before it."""
    if kind == "deepseek-moe":
        decoder, changes = published.publish(kind, folder), {"use_mla": False, "kv_lora_rank": None}
    else:
        decoder = save_oracle(tiny_config(kind), folder)
        changes = {"topk_method": "noaux_tc"} if kind == "deepseek-v3" else {}
    text = json.loads((folder / "config.json").read_text()) | changes
    text |= {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    torch.manual_seed(5)
    eyes = deepseek_vl2.Eyes(VISION, text["hidden_size"]).eval()
    randomize(eyes)
    tensors = {f"language.{n}": t for n, t in load_file(folder / "model.safetensors").items()}
    config = {
        **{"model_type": "deepseek_vl_v2", "language_config": text, "vision_config": VISION},
        **{"candidate_resolutions": SIZES, "tile_tag": "2D", "global_view_pos": "head"},
        "projector_config": {"n_embed": text["hidden_size"], "input_dim": 32},
        **keys,
    }
    files = {"processor_config": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}}
    unread = {"vision.attn_pool.latent": torch.zeros(2, 2)}
    write_checkpoint(
        folder,
        {**tensors, **eyes.state_dict(), **unread},
        config,
        files=files,
        marks={"<image>": MARK},
    )
    return decoder, eyes


def rows_of(eyes: Any, one: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    wide, high = size
    whole = values_of(ImageOps.pad(one, (22, 22), color=GREY))
    ground = values_of(ImageOps.pad(one, size, color=GREY))
    tiles = ground.unflatten(1, (high // 22, 22)).unflatten(3, (wide // 22, 22))
    with torch.inference_mode():
        rows: torch.Tensor = eyes(whole, tiles.permute(1, 3, 0, 2, 4))
    return rows


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek-v2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("deepseek-v3", "deepseek-moe")),
    ],
)
def test_pictures_are_seen_as_by_the_reference(kind: str, tmp_path: Path) -> None:
    """Wide and high ones."""
    decoder, eyes = checkpoint(tmp_path, kind)
    two = [picture(60, 21, 0), picture(17, 50, 1)]
    rows = [rows_of(eyes, one, size) for one, size in zip(two, ((66, 22), (22, 44)), strict=True)]
    agree(tmp_path, decoder, two, torch.cat(rows))


@pytest.mark.slow
def test_of_three_pictures_none_is_cut(tmp_path: Path) -> None:
    decoder, eyes = checkpoint(tmp_path)
    three = [picture(60, 21, 0), picture(17, 50, 1), picture(9, 9, 2)]
    agree(tmp_path, decoder, three, torch.cat([rows_of(eyes, one, (22, 22)) for one in three]))


def test_a_picture_of_which_nothing_would_be_left_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with pytest.raises(InvalidRequest, match="300 x 1 pixels"):
        processed(read_spec(tmp_path), [picture(300, 1)])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tile_tag", "1D"), ("global_view_pos", "tail"), ("candidate_resolutions", [[22, 30]])),
        ("projector_config.projector_type", "linear"), ("projector_config.n_embed", 7),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    section, _, name = key.rpartition(".")
    checkpoint(tmp_path, **({section: {"input_dim": 32, name: value}} if section else {key: value}))
    with pytest.raises(CheckpointError) as caught:
        read_spec(tmp_path)
        load_ours(model_spec(tmp_path))
    assert caught.value.field == name

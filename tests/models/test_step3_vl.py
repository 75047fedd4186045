"""Step-3 with images (MOD-02), which transformers has no class for: an independent reference of its eyes before that of
its text; windows of pictures as its code cuts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.base.errors import CheckpointError
from tests.front.media.pictures import picture
from tests.models.oracle import load_ours, model_spec, randomize
from tests.models.sight import agree, processed, read_spec, write_checkpoint
from tests.models.test_towers import CLIP
from tests.references import step3, step3_vl

PATCH_TOKEN = 90
MARKS = {"<im_patch>": PATCH_TOKEN, "<im_start>": 91, "<im_end>": 92, "<patch_start>": 93}
MARKS |= {"<patch_end>": 94, "<patch_newline>": 95}
SIDE, TILE = 52, 36
VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "patch_size": 1},
    **{"num_hidden_layers": 2, "image_size": SIDE, "output_hidden_size": 20, "num_channels": 3},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
"""As many patches a side as the published tower has, of one pixel."""


class Decoder:
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = {name: one.double() for name, one in weights.items()}

    def get_input_embeddings(self) -> torch.nn.Embedding:
        table = self.weights["model.embed_tokens.weight"].float()
        return torch.nn.Embedding.from_pretrained(table)

    def logits(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The text's reference, whose table holds what stands in each place."""
        own = {**self.weights, "model.embed_tokens.weight": x[0].double()}
        return step3.logits(step3.CONFIG, own, list(range(x.shape[1]))).float()[None]


def checkpoint(folder: Path, **vision: Any) -> tuple[Decoder, step3_vl.Eyes]:
    torch.manual_seed(5)
    eyes = step3_vl.Eyes(VISION, step3.CONFIG["hidden_size"]).eval()
    randomize(eyes)
    weights = step3.tensors(step3.CONFIG)
    text = {**step3.CONFIG, "max_position_embeddings": 1024}
    config = {
        **{"architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl"},
        **{"text_config": text, "vision_config": {**VISION, **vision}, "projector_bias": False},
        "understand_projector_stride": 2,
    }
    write_checkpoint(folder, {**weights, **eyes.state_dict()}, config, marks=MARKS)
    return Decoder(weights), eyes


def encode(text: str) -> list[int]:
    return [MARKS[one + ">"] for one in text.split(">")[:-1]]


def seen(eyes: step3_vl.Eyes, one: Image.Image) -> torch.Tensor:
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in CLIP)
    values = torch.from_numpy(np.array(one)).permute(2, 0, 1).float() / 255
    with torch.inference_mode():
        rows: torch.Tensor = eyes((values - mean) / std)
    return rows


def at(one: Image.Image, width: int, height: int) -> Image.Image:
    return one.resize((width, height), Image.Resampling.BILINEAR)


def test_a_picture_and_its_windows_are_seen_as_by_the_reference(tmp_path: Path) -> None:
    """70 x 40 becomes 72 x 36 for two windows."""
    decoder, eyes = checkpoint(tmp_path)
    one = picture(70, 40, 1)
    large = at(one, 72, 36)
    windows = [seen(eyes, large.crop((x, 0, x + TILE, TILE))) for x in (0, TILE)]
    rows = torch.cat((*windows, seen(eyes, at(one, SIDE, SIDE))))
    assert len(rows) == 2 * 81 + 169
    agree(tmp_path, decoder, [one], rows, encode=encode, decode=decoder.logits, step_tokens=100)


def test_a_picture_as_long_as_the_square_is_cut(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    spec = read_spec(tmp_path)
    for size, count in (((51, 40), 1), ((52, 40), 3), ((51, 20), 4), ((40, 40), 1)):
        (medium,) = processed(spec, [picture(*size)])
        assert len(medium.inputs) == count, size


@pytest.mark.parametrize(("key", "value"), [("enable_patch", False), ("image_size", 50)])
def test_what_is_not_read_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path, **{key: value})
    with pytest.raises(CheckpointError) as caught:
        read_spec(tmp_path)
        load_ours(model_spec(tmp_path))
    assert caught.value.field == key

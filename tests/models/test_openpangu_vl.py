"""openPangu-VL (MUL-03), which transformers has not, against an independent reference of its eyes and its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.layers.vision.axes_rope import spread
from headrace.base.errors import CheckpointError
from tests.front.media.pictures import picture
from tests.models.oracle import load_ours, model_spec, randomize
from tests.models.sight import agree, processed, read_spec, values_of, write_checkpoint
from tests.references import openpangu_vl as reference

SIZES = ((40, 24), (16, 56))
FILES = {"min_pixels": 64, "max_pixels": 4096}
MEAN = torch.tensor((0.48145466, 0.4578275, 0.40821073))[:, None, None]
DEVIATION = torch.tensor((0.26862954, 0.26130258, 0.27577711))[:, None, None]


def checkpoint(
    folder: Path, *, nested: bool = False, **vision: Any
) -> tuple[dict[str, torch.Tensor], reference.Eyes]:
    """As it is published; `nested`: under the names that transformers gives such models."""
    said = {**reference.VISION, **vision}
    torch.manual_seed(5)
    eyes = reference.Eyes(said, 48).eval()
    randomize(eyes)
    weights = reference.tensors()
    seen = {f"{'model.' if nested else ''}visual.{n}": t for n, t in eyes.state_dict().items()}
    text = {
        name.replace("model.", "model.language_model.", 1) if nested else name: tensor
        for name, tensor in weights.items()
    }
    config = {
        **{"architectures": ["OpenPanguVLForConditionalGeneration"], "model_type": "openpangu_vl"},
        **{"vision_config": said, "image_token_id": reference.IMAGE, "video_token_id": 91},
        **({"text_config": reference.TEXT} if nested else reference.TEXT),
        "torch_dtype": "float32",
    }
    write_checkpoint(folder, text | seen, config, files={"preprocessor_config": FILES})
    return weights, eyes


class Text:
    """The reference as a decoder of transformers, behind pictures of these sizes in tokens."""

    def __init__(self, weights: dict[str, torch.Tensor], sizes: list[tuple[int, int]]) -> None:
        self.weights, self.sizes = weights, sizes

    def get_input_embeddings(self) -> Any:
        table = self.weights["model.embed_tokens.weight"]
        return lambda ids: table[ids].clone()

    def decode(self, ids: torch.Tensor, x_1TE: torch.Tensor) -> torch.Tensor:
        return reference.decoded(self.weights, ids[0].tolist(), x_1TE[0], self.sizes)[None]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({}, id="published"),
        pytest.param(
            {"nested": True, "hidden_act": "silu", "mm_unit_vision_select_layer": [-2]},
            id="nested",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pictures_are_seen_as_by_the_reference(kind: dict[str, Any], tmp_path: Path) -> None:
    """Both are wider or higher than a window of 2 x 2 merged ones."""
    weights, eyes = checkpoint(tmp_path, **kind)
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    grids = [one.inputs[0].grid for one in processed(read_spec(tmp_path), pictures)]
    rows = []
    with torch.inference_mode():
        for one, (_, h, w) in zip(pictures, grids, strict=True):
            assert one.size == (4 * w, 4 * h)
            rows.append(eyes((values_of(one, 0.0, 1.0) - MEAN) / DEVIATION))
    text = Text(weights, [(h // 2, w // 2) for _, h, w in grids])
    agree(tmp_path, text, pictures, torch.cat(rows), decode=text.decode)


def test_axes_are_spread_over_the_pairs_of_the_published_model() -> None:
    axes = spread((16, 24, 24))
    assert [axes.count(axis) for axis in range(3)] == [16, 24, 24] and axes[-1] == 0
    assert axes[:8] == (0, 1, 2, 1, 2, 0, 1, 2) and spread((1, 2, 1)) == reference.AXES


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_gatedmerger", True), ("mm_unit_vision_select_layer", [-9]), ("window_size", 7)],
)
def test_what_is_not_read_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == key

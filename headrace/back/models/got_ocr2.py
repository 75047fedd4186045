"""GOT-OCR 2: Qwen 2's decoder behind SAM's tower at its one size, two convolutions that halve the
sides and one linear layer (Wei et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.sam import SamNames, SamSpec, SamTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    CLIP_MEAN,
    CLIP_STD,
    parts_of,
    square,
    text_decoder,
    with_media,
)
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm

MERGE = 4
NAMES = SamNames(
    layers="layers",
    norms=("layer_norm1", "layer_norm2"),
    neck=("neck.conv1", "neck.layer_norm1", "neck.conv2", "neck.layer_norm2"),
    halving=("conv_upsampler1", "conv_upsampler2"),
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GotOcr2ForConditionalGeneration."""
    text, vision = parts_of(config)
    outputs = text.int("hidden_size", ge=1)
    middle = vision.int("output_channels", 256, ge=1)
    spec = read_sam(vision, (2 * middle, outputs))
    if spec.side % MERGE:
        raise vision.wrong("image_size", f"such that {MERGE} divides {spec.side} patches")
    tower = GotOcr2Tower(scope, spec)
    return with_media(scope, text_decoder(scope / "language_model", text), tower)


def read_sam(vision: ConfigReader, narrowed: tuple[int, int], names: SamNames = NAMES) -> SamSpec:
    """SAM's tower as the config has it; `narrowed`, `names`: see SamSpec."""
    for key in ("use_abs_pos", "use_rel_pos"):
        if not vision.bool(key, True):
            raise vision.wrong(key, "true")
    sized = ConfigReader({"image_size": 1024, "patch_size": 16, **vision.raw}, vision.where)
    patch, side = square(sized)
    width = vision.int("hidden_size", 768, ge=1)
    inner = vision.int("mlp_dim", 0, ge=0) or int(width * vision.float("mlp_ratio", 4.0, ge=0.0))
    return SamSpec(
        patches=PatchSpec(patch=patch, mean=CLIP_MEAN, std=CLIP_STD, name="patch_embed.projection"),
        width=width,
        inner=inner,
        heads=vision.int("num_attention_heads", 12, ge=1),
        layers=vision.int("num_hidden_layers", 12, ge=1),
        side=side,
        window=vision.int("window_size", 14, ge=1),
        full_layers=vision.list("global_attn_indexes", (2, 5, 8, 11), of=int),
        eps=vision.float("layer_norm_eps", 1e-6, ge=0.0),
        activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu")],
        middle=vision.int("output_channels", 256, ge=1),
        narrowed=narrowed,
        bias=vision.bool("qkv_bias", True),
        names=names,
    )


class GotOcr2Tower:
    """`MediaEncoder`; `scope` is the checkpoint's."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: SamSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        behind = scope / "multi_modal_projector"
        self._spec = spec
        self._sam = SamTower(scope / "vision_tower", spec, behind)
        outputs = spec.narrowed[1]
        self._project = WholeLinear(behind / "multimodal_projector", outputs, outputs, bias=True)
        self.width, self.dtype = outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=spec.patches.row_bytes,
                patch=spec.patches.patch,
                merge=MERGE,
                sides=((spec.side, spec.side),),
                max_t=1,
            ),
        )

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        windows = self._spec.side // MERGE
        rows = rows_NB.view(len(grids), windows, windows, MERGE, MERGE, -1).transpose(2, 3)
        features = self._sam.forward(rows.reshape(rows_NB.shape), self._spec.side)
        return self._project.project(features.flatten(2).transpose(1, 2).flatten(0, 1))

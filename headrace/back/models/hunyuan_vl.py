"""HunYuanVL and HunyuanOCR: Hunyuan's dense decoder, in whose positions the windows of images have
their column, their row and the number of the image, behind a tower of one table of places; a window
becomes a token by convolutions, a learned row ends each row of windows, and one stands at either
end (Tencent 2025, HunyuanOCR; transformers 5.23, modeling_hunyuan_vl.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.axes_rope import PlaceRope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.models import hunyuan_v1
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.hunyuan_v1 import axis_sections
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    LayerDefaults,
    parts_of,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

NAMES = VisionLayerNames(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    attention="self_attn",
    merged=None,
    out="o_proj",
    mlp=("dense_h_to_4h", "dense_4h_to_h"),
)
DEFAULTS = LayerDefaults(
    width=1152, heads=16, inner=4304, eps=1e-5, activation="gelu", eps_key="rms_norm_eps"
)
RENAMED = (
    (r"(?:model\.)?(?:vit|vision_tower)\.(.*)", r"vit.\1"),
    (r"model\.language_model\.(.*)", r"model.\1"),
)
"""Published names, and those of transformers."""
UNUSED = (r"vit\.perceive\.image_sep",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HunYuanVLForConditionalGeneration."""
    text, vision = parts_of(config)
    sizes, sections = read_sizes(text, eps=1e-5), axis_sections(text)
    spec = read_rope(text, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    if len(sections) < 3 or sum(sections) != len(spec.frequencies):
        wanted = f"three or more numbers with sum {len(spec.frequencies)}"
        raise text.wrong("mrope_section", wanted)
    merge = vision.int("spatial_merge_size", 2, ge=1, le=16)
    rope = PlaceRope(scope, spec, sections=sections, merge=merge)
    tower = PlainTower(scope, scope / "vit", _tower(text, vision, merge), rope)
    decoder = with_media(scope, hunyuan_v1.build(scope, text), tower, renamed=RENAMED)
    weights = decoder.weights
    decoder.weights = replace(weights, ignored=(*weights.ignored, *UNUSED))
    return decoder


def _tower(text: ConfigReader, vision: ConfigReader, merge: int) -> PlainTowerSpec:
    vision.choice("interpolate_mode", ("bilinear",), "bilinear")
    layer = tower_layer(vision, DEFAULTS, NAMES)
    patch = vision.int("patch_size", 16, ge=1, le=1024)
    side = vision.int("max_image_size", 2048, ge=patch) // patch
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=CLIP_MEAN, std=CLIP_STD, name="embeddings.patch_embedding"
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 27, ge=1),
        projector=RowsSpec(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            merge=merge,
            eps=layer.eps,
            activation=layer.activation,
        ),
        table_side=side,
        smooth=False,
        skipped=1,
        positions=("embeddings.position_embedding.weight", (side**2 + 1, layer.width)),
        layers_name="layers",
        extra=2,
        row_extra=1,
    )


@dataclass(frozen=True, kw_only=True)
class RowsSpec:
    """Windows by a norm and three layers, with learned rows around them and behind each of their
    rows, then one more norm."""

    width: int
    outputs: int
    merge: int
    eps: float
    activation: str

    def build(self, scope: Scope) -> RowsProjector:
        """See ProjectorSpec."""
        return RowsProjector(scope / "vit.perceive", self)


class RowsProjector:
    """x_NE -> y_MF by RowsSpec; `GridProjector`."""

    def __init__(self, scope: Scope, spec: RowsSpec) -> None:
        width, outputs = spec.width, spec.outputs
        self._scope, self._spec = scope, spec
        self._before = RMS.build(scope / "before_rms", width, eps=spec.eps)
        self._after = RMS.build(scope / "after_rms", outputs, eps=spec.eps)
        self._activation = ElementwiseActivation(scope, spec.activation)
        shapes = {
            "proj.0": (2 * width, width, spec.merge, spec.merge),
            "proj.2": (4 * width, 2 * width, 1, 1),
            "mlp": (outputs, 4 * width),
        }
        self._params = [
            ((scope / name).param("weight", shape), (scope / name).param("bias", shape[:1]))
            for name, shape in shapes.items()
        ]
        self._marks = [
            scope.param(name, (size,))
            for name, size in (
                ("image_begin", outputs),
                ("image_newline", 4 * width),
                ("image_end", outputs),
            )
        ]
        self._linears = [not_loaded] * len(shapes)
        self._rows = [torch.empty(0)] * len(self._marks)
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of one image of one row."""
        return self.merge_grids(x_NE, [(1, self._spec.merge, x_NE.shape[0] // self._spec.merge)])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        merge, width = self._spec.merge, self._spec.width
        convolve, widen, project = self._linears
        x_MWE = self._before.norm(x_NE).view(-1, merge**2, width)
        y_MX = widen(self._activation.apply(convolve(x_MWE.transpose(1, 2).flatten(1))))
        y_MF = project(y_MX)
        begin_1F, newline_1F, end_1F = self._rows
        images: list[torch.Tensor] = []
        parts = y_MF.split([t * h * w // merge**2 for t, h, w in grids])
        for part_MF, (_, _, w) in zip(parts, grids, strict=True):
            rows_HLF = part_MF.unflatten(0, (-1, w // merge))
            ends_H1F = newline_1F.expand(rows_HLF.shape[0], 1, -1)
            images += [begin_1F, torch.cat((rows_HLF, ends_H1F), dim=1).flatten(0, 1), end_1F]
        return self._after.norm(torch.cat(images))

    def _finish(self) -> None:
        taken = [(weight.take(), bias.take()) for weight, bias in self._params]
        self._linears = [
            bind_linear(self._scope, weight.flatten(1).contiguous(), bias) for weight, bias in taken
        ]
        begin_F, newline_X, end_F = (mark.take()[None] for mark in self._marks)
        self._rows = [begin_F, self._linears[2](newline_X), end_F]

"""Step 3.7, and Step3-VL around Qwen 3, with images: tiles and the whole through a tower with a
table of places and rotary ones, two convolutions that halve its sides, one linear layer (StepFun
2026; transformers 5.23, modeling_step3p7.py; a tile is an image of its own, with text between)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.patch_places.op import coordinates
from headrace.back.kernels.upload import planned
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.layers.vision.turns import columns_first
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    LayerDefaults,
    parts_of,
    square,
    text_alone,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

NAMES = VisionLayerNames(
    before_attention="ln_1",
    before_mlp="ln_2",
    attention="attn",
    merged="qkv",
    out="out_proj",
    mlp=("c_fc", "c_proj"),
)
STORED = ((r"(vision_model\..*)\.attn\.in_proj_(weight|bias)", r"\1.attn.qkv.\2"),)
"""How checkpoints name the one tensor of queries, keys and values."""
MERGE = 4
DEFAULTS = LayerDefaults(
    width=1536,
    heads=16,
    eps=1e-5,
    activation="quick_gelu",
    width_keys=("hidden_size", "width"),
    heads_keys=("num_attention_heads", "heads"),
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Step3p7ForConditionalGeneration, StepVLForConditionalGeneration."""
    inside = replace(scope, base_within="model")
    if config.section("vision_config") is None:
        text = config.section("text_config") or config
        return text_alone(inside, text, "the checkpoint has no vision tower")
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vision_model", _tower(config, text, vision))
    return with_media(scope, text_decoder(inside, text), tower, renamed=STORED)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    if vision.bool("use_cls_token", False):
        raise vision.wrong("use_cls_token", "false")
    for key in ("use_abs_posemb", "use_rope2d", "use_ln_pre"):
        if not vision.bool(key, True):
            raise vision.wrong(key, "true")
    layer = tower_layer(
        vision,
        DEFAULTS,
        NAMES,
        rotary=True,
        rotary_layout="pairs",
        scaled=("ls_1.gamma", "ls_2.gamma"),
    )
    width = layer.width
    layer = replace(layer, inner=int(width * vision.float("mlp_ratio", 8960 / 1536, ge=0.0)))
    patch, side = square(vision)
    ropes = vision.section("rope_parameters") or vision
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=CLIP_MEAN, std=CLIP_STD, bias=False, name="conv1"),
        layer=layer,
        layers=vision.int("num_hidden_layers", 47, aliases=("layers",), ge=1),
        projector=HalvingSpec(
            halvings=(
                Halving(name="vision_model.vit_downsampler1", inputs=width, outputs=2 * width),
                Halving(name="vision_model.vit_downsampler2", inputs=2 * width, outputs=4 * width),
            ),
            outputs=text.int("hidden_size", ge=1),
            bias=config.bool("projector_bias", False),
        ),
        table_side=side,
        smooth=False,
        positions=("positional_embedding", (side**2, width)),
        before=TowerNorm(name="ln_pre", norm=LAYER),
        behind=TowerNorm(name="ln_post", norm=LAYER) if vision.bool("use_ln_post", False) else None,
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        turns=columns_first,
        layers_name="transformer.resblocks",
    )


@dataclass(frozen=True, kw_only=True)
class Halving:
    """A convolution that halves the sides: `size` pixels a side, `padding` around."""

    name: str
    inputs: int
    outputs: int
    size: int = 3
    padding: int = 1


@dataclass(frozen=True, kw_only=True)
class HalvingSpec:
    """Two convolutions, each of which halves the sides, and one linear layer."""

    halvings: tuple[Halving, Halving]
    outputs: int
    bias: bool
    merge: int = MERGE

    def build(self, scope: Scope) -> HalvingProjector:
        """See ProjectorSpec."""
        return HalvingProjector(scope, self)


class HalvingProjector:
    """x_NE -> y_MF by HalvingSpec; `GridProjector`."""

    def __init__(self, scope: Scope, spec: HalvingSpec) -> None:
        self._halvings = spec.halvings
        self._params = [
            (
                (scope / one.name).param("weight", (one.outputs, one.inputs, one.size, one.size)),
                (scope / one.name).param("bias", (one.outputs,), init="zeros"),
            )
            for one in spec.halvings
        ]
        self._convolutions: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = scope / "vit_large_projector"
        inputs = spec.halvings[-1].outputs
        self._linear = WholeLinear(at, inputs, spec.outputs, bias=spec.bias)
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of one square image."""
        side = int(x_NE.shape[0] ** 0.5)
        return self.merge_grids(x_NE, [(1, side, side)])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        parts = x_NE.split([t * h * w for t, h, w in grids])
        rows = [self._halved(part, grid) for part, grid in zip(parts, grids, strict=True)]
        return self._linear.project(torch.cat(rows))

    def _halved(self, x_NE: torch.Tensor, grid: Grid) -> torch.Tensor:
        t, h, w = grid
        row_N, column_N = coordinates((1, h, w), MERGE)
        place_N = planned(row_N * w + column_N, x_NE.device)
        x_TNE = x_NE.unflatten(0, (t, -1))
        plain_TNE = torch.empty_like(x_TNE).index_copy_(1, place_N, x_TNE)
        planes = plain_TNE.transpose(1, 2).unflatten(2, (h, w))
        for one, (weight, bias) in zip(self._halvings, self._convolutions, strict=True):
            planes = F.conv2d(planes, weight, bias, stride=2, padding=one.padding)
        return planes.flatten(2).transpose(1, 2).flatten(0, 1).contiguous()

    def _finish(self) -> None:
        self._convolutions = [(weight.take(), bias.take()) for weight, bias in self._params]

"""Llama 4 with images: tiles of one size through a tower with both a table of places and rotary
ones, windows of patches side by side, two layers with an activation behind each, and one linear
layer (Meta 2025; transformers 5.23, modeling_llama4.py; a tile is an image of its own, with text
between them)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.layers.vision.turns import columns_then_rows
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    HALF,
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
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    attention="self_attn",
    merged=None,
    out="o_proj",
)
EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Llama4ForConditionalGeneration."""
    inside = scope / "language_model"
    if config.section("vision_config") is None:
        text = config.section("text_config") or config
        return text_alone(inside, text, "the checkpoint has no vision tower")
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vision_model", _tower(text, vision))
    return with_media(scope, text_decoder(inside, text), tower)


def _tower(text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    defaults = LayerDefaults(heads=16, inner=5632, eps=EPS, eps_key=None, activation="gelu")
    layer = tower_layer(vision, defaults, NAMES, rotary=True, rotary_layout="pairs")
    width = layer.width
    patch, side = square(vision)
    merge = round(1 / vision.float("pixel_shuffle_ratio", 0.5, ge=0.01, le=1.0))
    if side % merge:
        raise vision.wrong("pixel_shuffle_ratio", f"1 over a divisor of {side} patches a side")
    ropes = vision.section("rope_parameters") or vision
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=HALF, std=HALF, bias=False, name="patch_embedding.linear", flat=True
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 34, ge=1),
        projector=Llama4AdapterSpec(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            merge=merge,
            inner=vision.int("projector_input_dim", 4096, ge=1),
            middle=vision.int("projector_output_dim", 4096, ge=1),
        ),
        side=side,
        positions=("positional_embedding_vlm", (side**2 + 1, width)),
        class_token=("class_embedding", (width,)),
        class_last=True,
        before=TowerNorm(name="layernorm_pre", norm=LAYER),
        behind=TowerNorm(name="layernorm_post", norm=LAYER),
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        turns=columns_then_rows,
        layers_name="model.layers",
    )


@dataclass(frozen=True, kw_only=True)
class Llama4AdapterSpec:
    """`inner`, `middle`: outputs of the two layers before the last."""

    width: int
    outputs: int
    merge: int
    inner: int
    middle: int

    def build(self, scope: Scope) -> Llama4Adapter:
        """See ProjectorSpec."""
        return Llama4Adapter(scope, self)


class Llama4Adapter:
    """x_NE -> y_MF by Llama4AdapterSpec."""

    def __init__(self, scope: Scope, spec: Llama4AdapterSpec) -> None:
        within = scope / "vision_model.vision_adapter.mlp"
        self._window = spec.width * spec.merge**2
        self._first = WholeLinear(within / "fc1", self._window, spec.inner)
        self._second = WholeLinear(within / "fc2", spec.inner, spec.middle)
        last = scope / "multi_modal_projector.linear_1"
        self._last = WholeLinear(last, spec.middle, spec.outputs)
        self._activation = ElementwiseActivation(scope, "gelu")

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        x_MI = self._activation.apply(self._first.project(x_NE.view(-1, self._window)))
        return self._last.project(self._activation.apply(self._second.project(x_MI)))

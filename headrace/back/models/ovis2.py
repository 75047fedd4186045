"""Ovis 2: tiles of one size through AIMv2's tower, whose patches become mixtures of the words of a
visual vocabulary; the marks around tiles are words of it too (Lu et al. 2024, Ovis; transformers
5.23, modeling_ovis2.py; a tile is an image of its own)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER, RMS
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    LayerDefaults,
    parts_of,
    square,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import Packing

NAMES = VisionLayerNames(
    before_attention="rms_norm1",
    before_mlp="rms_norm2",
    attention="attention",
    merged=None,
    out="out_proj",
    mlp_module="ffn",
    mlp=("gate_proj", "up_proj", "down_proj"),
)
HEAD_EPS = 1e-5
DEFAULTS = LayerDefaults(
    width=1024, heads=8, inner=2816, eps=1e-5, eps_key="rms_norm_eps", activation="silu"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Ovis2ForConditionalGeneration."""
    text, vision = parts_of(config)
    at = scope / "model.vision_tower.transformer"
    tower = PlainTower(scope / "model", at, _tower(config, text, vision))
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, text_decoder(inside, text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    patch, side = square(vision)
    vision.choice("tokenize_function", ("softmax",), "softmax")
    marks = config.list("visual_indicator_token_ids", list(range(151_666, 151_671)), of=int)
    count = vision.int("num_visual_indicator_tokens", 5, ge=0)
    if len(marks) != count:
        raise config.wrong("visual_indicator_token_ids", f"{count} ids")
    stride = vision.int("hidden_stride", 1, ge=1)
    if side % stride:
        raise vision.wrong("hidden_stride", f"a divisor of {side} patches a side")
    bias = vision.bool("qkv_bias", False)
    layer = tower_layer(
        vision,
        DEFAULTS,
        NAMES,
        norm=RMS,
        bias=bias,
        out_bias=bias,
        mlp_bias=vision.bool("mlp_bias", False),
    )
    width = layer.width
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=CLIP_MEAN, std=CLIP_STD, name="embeddings.patch_embedding"
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 24, ge=1),
        projector=VisualWordsSpec(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            merge=stride,
            words=vision.int("vocab_size", 16_384, ge=1),
            marks=count,
        ),
        side=side,
        positions=("embeddings.position_embedding.weight", (side**2, width)),
        embedded=TowerNorm(name="embeddings.rms_norm", norm=RMS),
        behind=TowerNorm(name="rms_norm", norm=RMS),
        packings={"image": Packing(marks=tuple(marks))},
    )


@dataclass(frozen=True, kw_only=True)
class VisualWordsSpec:
    """`words` of the visual vocabulary, of which the last are `marks`. `names`: of the linear
    layer, its norm and the table."""

    width: int
    outputs: int
    merge: int
    words: int
    marks: int
    names: tuple[str, str, str] = (
        "vision_tower.head_linear",
        "vision_tower.head_norm",
        "visual_embeddings_table",
    )

    def build(self, scope: Scope) -> VisualWords:
        """See ProjectorSpec."""
        return VisualWords(scope, self)


class VisualWords:
    """x_NE -> y_MF by VisualWordsSpec: the mean of the vocabulary's rows, each as likely as a
    linear layer and a norm say."""

    def __init__(self, scope: Scope, spec: VisualWordsSpec) -> None:
        (head, norm, table), plain = spec.names, spec.words - spec.marks
        self._scope, self._plain, self._inputs = scope, plain, spec.width * spec.merge**2
        self._head = WholeLinear(scope / head, self._inputs, plain)
        self._norm = LAYER.build(scope / norm, plain, eps=HEAD_EPS)
        shape = (spec.words, spec.outputs)
        self._table = (scope / table).param("weight", shape)
        self._mean = not_loaded
        self.marks = torch.empty(0)
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        logits_MV = self._norm.norm(self._head.project(x_NE.view(-1, self._inputs)))
        mean: torch.Tensor = self._mean(logits_MV.softmax(dim=-1))
        return mean

    def _finish(self) -> None:
        table_VF = self._table.take()
        self.marks = table_VF[self._plain :].clone()
        self._mean = bind_linear(self._scope, table_VF[: self._plain].T.contiguous(), None)

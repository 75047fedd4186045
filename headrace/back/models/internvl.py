"""InternVL 3 as converted for transformers: tiles of one size through InternViT, windows of patches
side by side, two linear layers (Zhu et al. 2025; a tile is an image of its own, and so is each
frame of a video)."""

from __future__ import annotations

from headrace.back.layers.norm import LAYER, RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    parts_of,
    square,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader

NORMS = {"layer_norm": LAYER, "rms_norm": RMS}
NAMES = VisionLayerNames(
    before_attention="layernorm_before",
    before_mlp="layernorm_after",
    attention="attention",
    merged=None,
    out="projection_layer",
)
PROJECTOR_EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InternVLForConditionalGeneration."""
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vision_tower", _tower(config, text, vision))
    return with_media(scope, text_decoder(scope / "language_model", text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    width, heads = (
        vision.int("hidden_size", 1024, ge=1),
        vision.int("num_attention_heads", 16, ge=1),
    )
    patch, side = square(vision)
    merge = round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0))
    if config.int("vision_feature_layer", -1) != -1:
        raise config.wrong("vision_feature_layer", "-1, the last layer")
    if side % merge:
        raise config.wrong("downsample_ratio", f"1 over a divisor of {side} patches a side")
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 4 * width, ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=vision.float("layer_norm_eps", 1e-6, ge=0.0),
        activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu")],
        norm=NORMS[vision.choice("norm_type", NORMS, "layer_norm")],
        bias=vision.bool("attention_bias", False),
        scaled=("lambda_1", "lambda_2"),
        qk_norm=("q_norm", "k_norm") if vision.bool("use_qk_norm", False) else None,
        qk_norm_kind=RMS,
        names=NAMES,
    )
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            name="embeddings.patch_embeddings.projection",
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 24, ge=1),
        projector=TwoLayers(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            merge=merge,
            activation=ACTIVATIONS[config.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
            norm=("layer_norm", LAYER, PROJECTOR_EPS),
            norm_merged=True,
        ),
        side=side,
        positions=("embeddings.position_embeddings", (1, side**2 + 1, width)),
        class_token=("embeddings.cls_token", (1, 1, width)),
        behind=None
        if vision.bool("use_mean_pooling", True)
        else TowerNorm(name="layernorm", norm=LAYER),
        layers_name="encoder.layer",
        frames=True,
    )

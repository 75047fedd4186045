"""LFM3-VL: LFM3's decoder, whose positions are those of text, behind a tower of gated convolutions
with some layers of attention, windows of patches side by side and two linear layers (transformers
5.23, modeling_lfm3_vl.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import LAYER, RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.conv_tower import ConvTower, ConvTowerSpec
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    HALF,
    LayerDefaults,
    parts_of,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

CONV, FULL = "conv", "full_attention"
NAMES = VisionLayerNames(
    before_attention="operator_norm",
    before_mlp="ffn_norm",
    attention="self_attn",
    merged=None,
    out="out_proj",
    mlp_module="feed_forward",
    mlp=("w1", "w3", "w2"),
)
DEFAULTS = LayerDefaults(
    width=1024, heads=16, inner=2560, eps=1e-5, eps_key="norm_eps", activation="silu"
)
PROJECTOR_EPS = 1e-6


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Lfm3VlForConditionalGeneration."""
    text, vision = parts_of(config)
    spec = _tower(config, text, vision)
    tower = ConvTower(scope / "model", scope / "model.vision_tower", spec)
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, text_decoder(inside, text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> ConvTowerSpec:
    layers = vision.int("num_hidden_layers", 14, ge=1)
    default = [CONV if i < 2 or i % 2 else FULL for i in range(layers)]
    kinds = vision.list("layer_types", default, of=str)
    if len(kinds) != layers or not set(kinds) <= {CONV, FULL}:
        raise vision.wrong("layer_types", f"{layers} of {CONV}, {FULL}")
    taps = vision.int("conv_kernel_size", 3, ge=1, le=31)
    if taps % 2 == 0:
        raise vision.wrong("conv_kernel_size", "an odd number")
    rope = vision.section("rope_parameters") or vision
    layer = tower_layer(
        vision,
        DEFAULTS,
        NAMES,
        norm=RMS,
        rotary=True,
        bias=False,
        out_bias=False,
        mlp_bias=False,
        kv_heads=vision.int("num_key_value_heads", 8, ge=1),
        qk_norm=("q_layernorm", "k_layernorm"),
        qk_per_head=True,
    )
    return ConvTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 16, ge=1, le=1024),
            frames=vision.int("temporal_patch_size", 2, ge=1, le=16),
            mean=HALF,
            std=HALF,
            bias=False,
            name="patchifier",
            flat=True,
        ),
        layer=layer,
        attends=tuple(kind == FULL for kind in kinds),
        taps=taps,
        theta=rope.float("rope_theta", 1_000_000.0, ge=1.0),
        projector=TwoLayers(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
            bias=config.bool("projector_bias", True),
            activation=ACTIVATIONS[config.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
            norm=("layer_norm", LAYER, PROJECTOR_EPS),
            inner=config.int("projector_hidden_size", 4096, ge=1),
        ),
    )

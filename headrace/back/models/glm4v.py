"""GLM-4.1V, GLM-4.5V and GLM-4.6V: GLM 4's decoder, dense or with experts, with positions in three
axes, behind a vision tower of patches of two frames (GLM-V team 2025)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.axes_rope import AxesRope, sections
from headrace.back.layers.vision.grids import bicubic
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.reducer import ReducerSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models import glm4, glm4_moe
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    CLIP_MEAN,
    CLIP_STD,
    parts_of,
    square,
    with_media,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Glm4vForConditionalGeneration, Glm4vMoeForConditionalGeneration,
    Glm46VForConditionalGeneration, GlmOcrForConditionalGeneration."""
    text, vision = parts_of(config)
    mixes = "n_routed_experts" in text
    ocr = config.raw["architectures"][0] == "GlmOcrForConditionalGeneration"
    text = ConfigReader({"attention_bias": not ocr, **text.raw}, text.where)
    rope = _rope(scope, text, vision, default_share=1.0 if ocr else 0.5)
    spec = ocr_tower(vision) if ocr else _tower(vision)
    tower = VisionTower(scope / "model.visual", spec, rope)
    inside = replace(scope, base_within="model.language_model")
    decoder = (glm4_moe if mixes else glm4).build(inside, text)
    return with_media(scope, decoder, tower)


def _rope(
    scope: Scope, text: ConfigReader, vision: ConfigReader, *, default_share: float
) -> AxesRope:
    width, heads = text.int("hidden_size", ge=1), text.int("num_attention_heads", ge=1)
    spec = read_rope(
        text,
        head_dim=text.int("head_dim", width // heads, ge=1),
        max_positions=scope.max_positions,
        default_share=default_share,
    )
    values = text.section("rope_parameters") or text.section("rope_scaling") or text
    lengths = values.list("mrope_section", (8, 12, 12), of=int, length=3)
    if sum(lengths) != len(spec.frequencies):
        raise values.wrong("mrope_section", f"three numbers with sum {len(spec.frequencies)}")
    merge = vision.int("spatial_merge_size", 2, ge=1)
    return AxesRope(scope, spec, axis_of_pair=sections(lengths), merge=merge)


def ocr_tower(vision: ConfigReader) -> TowerSpec:
    """GLM-OCR's: norms over heads, biases, no learned places."""
    whole = _tower(vision)
    bias = vision.bool("attention_bias", True)
    outputs = vision.int("out_hidden_size", 1536, ge=1)
    assert isinstance(whole.merger, ReducerSpec)
    layer = replace(
        whole.layer,
        inner=vision.int("intermediate_size", 4096, ge=1),
        bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qk_norm=("q_norm", "k_norm"),
        qk_per_head=True,
    )
    merger = replace(whole.merger, outputs=outputs, inner=3 * outputs)
    return replace(whole, layer=layer, merger=merger, positions=0, before=None)


def _tower(vision: ConfigReader) -> TowerSpec:
    width, heads = vision.int("hidden_size", 1536, ge=1), vision.int("num_heads", 12, ge=1)
    outputs = vision.int("out_hidden_size", 4096, ge=1)
    activation = ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "silu")]
    patch, side = square(vision)
    layer = VisionLayerSpec(
        width=width,
        inner=outputs,
        heads=heads,
        head_dim=width // heads,
        eps=vision.float("rms_norm_eps", 1e-5, ge=0.0),
        activation=activation,
        norm=RMS,
        rotary=True,
        bias=vision.bool("attention_bias", False),
        out_bias=False,
        mlp_bias=False,
        names=VisionLayerNames(mlp=("gate_proj", "up_proj", "down_proj")),
    )
    return TowerSpec(
        patches=PatchSpec(
            patch=patch,
            frames=vision.int("temporal_patch_size", 2, ge=1),
            mean=CLIP_MEAN,
            std=CLIP_STD,
        ),
        layer=layer,
        layers=vision.int("depth", 24, ge=1),
        merger=ReducerSpec(
            width=width,
            outputs=outputs,
            merge=vision.int("spatial_merge_size", 2, ge=1),
            inner=vision.int("intermediate_size", 13696, ge=1),
            activation=activation,
        ),
        positions=side**2,
        taps=bicubic,
        max_t=1,
        before="post_conv_layernorm",
        behind="post_layernorm",
        names=("blocks", "merger", "", "embeddings.position_embedding"),
    )

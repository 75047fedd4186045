"""Kimi-VL with images, Kimi-K2.5 with images and video: DeepSeek V3's decoder behind a tower of
patches of any size with both a learned table of places and rotary ones. The frames of a clip attend
to each other and become the mean of them (Kimi team 2025, Kimi-VL; 2026, Kimi K2.5)."""

from __future__ import annotations

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.grids import bicubic
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.merger import MergerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.layers.vision.turns import columns_beside_rows
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    HALF,
    parts_of,
    text_alone,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader

EPS = 1e-5
PROJECTORS = {
    False: ("multi_modal_projector", ("linear_1", "linear_2")),
    True: ("mm_projector", ("proj.0", "proj.2")),
}
"""By whether there are clips: the module of the projection, and its layers."""
NAMES = VisionLayerNames(
    before_attention="norm0",
    before_mlp="norm1",
    attention="",
    merged="wqkv",
    out="wo",
    mlp=("fc0", "fc1"),
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """KimiVLForConditionalGeneration, Kimi_K25ForConditionalGeneration,
    KimiK25ForConditionalGeneration."""
    inside = scope / "language_model"
    if config.section("vision_config") is None:
        text = config.section("text_config") or config
        return text_alone(inside, text, "the checkpoint has no vision tower")
    text, vision = parts_of(config)
    tower = VisionTower(scope, _tower(config, text, vision), None)
    return with_media(scope, text_decoder(inside, text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> TowerSpec:
    width = vision.int("hidden_size", 1152, aliases=("vt_hidden_size",), ge=1)
    heads = vision.int("num_attention_heads", 16, aliases=("vt_num_attention_heads",), ge=1)
    side = vision.int("pos_emb_height", 64, aliases=("init_pos_emb_height",), ge=1)
    across = vision.int("pos_emb_width", side, aliases=("init_pos_emb_width",), ge=1)
    if across != side:
        raise vision.wrong("pos_emb_width", f"pos_emb_height ({side})")
    merge = vision.list("merge_kernel_size", [2, 2], of=int, length=2)
    if merge[0] != merge[1] or merge[0] < 1:
        raise vision.wrong("merge_kernel_size", "two equal numbers")
    clips = config.str("model_type", "") != "kimi_vl"
    projector, linear = PROJECTORS[clips]
    projector_eps = vision.float("projector_ln_eps", EPS, ge=0.0)
    ropes = vision.section("rope_parameters") or vision
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 4304, aliases=("vt_intermediate_size",), ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")],
        norm=LAYER,
        rotary=True,
        rotary_layout="pairs",
        names=NAMES,
    )
    return TowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 14, ge=1),
            mean=HALF,
            std=HALF,
            name="vision_tower.patch_embed.proj",
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 27, aliases=("vt_num_hidden_layers",), ge=1),
        merger=MergerSpec(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            merge=merge[0],
            norm=LAYER,
            eps=config.float("projection_layer_norm_eps", projector_eps, ge=0.0),
            names=("pre_norm", *linear),
        ),
        positions=side**2,
        square_table=True,
        taps=bicubic,
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        turns=columns_beside_rows,
        video=clips,
        max_t=vision.int("pos_emb_time", 4, aliases=("init_pos_emb_time",), ge=1),
        clips=clips,
        behind="vision_tower.encoder.final_layernorm",
        names=(
            "vision_tower.encoder.blocks",
            projector,
            "",
            "vision_tower.patch_embed.pos_emb",
        ),
    )

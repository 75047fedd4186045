"""DeepSeek-VL, Janus and Janus-Pro as they see, and VideoLLaMA 3 with images: Llama's or Qwen's
decoder behind SigLIP's tower and two linear layers (Lu et al. 2024; Wu et al. 2024; Zhang et al.
2025). What makes images is not read."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.kernels.patch_places.op import rows_then_columns
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    HALF,
    OLDER_TOWER,
    SIGLIP_NAMES,
    LayerDefaults,
    parts_of,
    siglip_layer,
    siglip_tower,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

JANUS = LayerDefaults(width=1024, heads=16, inner=None, activation="gelu")
UNREAD = (r"model\.(vqmodel|generation_\w+)\..*",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekVLForConditionalGeneration, JanusForConditionalGeneration,
    VideoLlama3ForConditionalGeneration."""
    text, vision = parts_of(config)
    outputs = text.int("hidden_size", ge=1)
    spec = TOWERS[config.raw["architectures"][0]](vision, outputs)
    within = scope / "model"
    tower = PlainTower(within, within / "vision_model", spec)
    inside = replace(scope, base_within="model.language_model")
    decoder = with_media(scope, text_decoder(inside, text), tower, renamed=OLDER_TOWER)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder


def _deepseek(vision: ConfigReader, outputs: int) -> PlainTowerSpec:
    layer = siglip_layer(vision)
    projector = TwoLayers(
        width=layer.width, outputs=outputs, names=("linear1", "linear2"), module="aligner"
    )
    return siglip_tower(vision, projector, layer)


def _janus(vision: ConfigReader, outputs: int) -> PlainTowerSpec:
    if vision.bool("use_qk_norm", False):
        raise vision.wrong("use_qk_norm", "false")
    if vision.int("depth", 2) != 2:
        raise vision.wrong("depth", "2 layers that lead to the decoder")
    if vision.int("projection_dim", 2048, ge=1) != outputs:
        raise vision.wrong("projection_dim", f"hidden_size of the text ({outputs})")
    width = vision.int("hidden_size", 1024, ge=1)
    inner = int(width * vision.float("mlp_ratio", 4.0, ge=0.0))
    sized = ConfigReader({**vision.raw, "intermediate_size": inner}, vision.where)
    names = replace(SIGLIP_NAMES, out="projection_layer")
    layer = tower_layer(sized, JANUS, names, bias=vision.bool("attention_bias", True))
    projector = TwoLayers(
        width=width,
        outputs=outputs,
        names=("fc1", "hidden_layers.0"),
        activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu")],
        module="aligner",
    )
    return siglip_tower(
        ConfigReader({"num_hidden_layers": 24, **sized.raw}, sized.where), projector, layer
    )


def _video_llama(vision: ConfigReader, outputs: int) -> PlainTowerSpec:
    """At any size, with places that turn."""
    layer = replace(siglip_layer(vision), rotary=True)
    ropes = vision.section("rope_parameters") or vision
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 14, ge=1, le=1024),
            mean=HALF,
            std=HALF,
            name="embeddings.patch_embedding",
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 12, ge=1),
        projector=TwoLayers(
            width=layer.width,
            outputs=outputs,
            names=("readout.0", "readout.2"),
            module="projector",
        ),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        turns=rows_then_columns,
    )


TOWERS = {
    "DeepseekVLForConditionalGeneration": _deepseek,
    "JanusForConditionalGeneration": _janus,
    "VideoLlama3ForConditionalGeneration": _video_llama,
}
"""By architecture, from the tower's section and the decoder's width."""

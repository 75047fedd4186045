"""Nemotron Nano VL and Omni: Nemotron-H's decoder behind RADIO's tower at any size, windows of
patches side by side and two linear layers, and for sound behind Parakeet's encoder (NVIDIA 2026;
transformers 5.23, modeling_nemotron_h_omni.py, modeling_radio.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.audio.fast_conformer_tower import FastConformerTower
from headrace.back.layers.norm import LAYER_NO_WEIGHT, RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.parakeet import conformer_spec
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    LayerDefaults,
    parts_of,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

DEFAULTS = LayerDefaults(width=1280, heads=16, inner=None, activation="gelu")
PROJECTOR_EPS = 1e-5
MERGE = 2
UNREAD = (
    r"sound_encoder\.encoder\.feature_extractor\..*",
    r"sound_encoder\.encoder\.layers\.\d+\.conv\.norm\.num_batches_tracked",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """NemotronH_Omni_Reasoning_V3, NemotronH_Nano_Omni_Reasoning_V3."""
    text, vision = parts_of(config)
    within = scope / "vision_model.radio_model.model"
    sees = PlainTower(scope, within, _tower(config, text, vision))
    audio = config.section("audio_config", aliases=("sound_config",))
    tower = sees if audio is None else Towers(sees, _hearing(scope, audio, sees.width))
    decoder = with_media(scope, text_decoder(scope / "language_model", text), tower)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder


def _hearing(scope: Scope, audio: ConfigReader, outputs: int) -> FastConformerTower:
    """A sound's last position is of a frame that no other sees."""
    spec = conformer_spec(audio, plain=True)
    projector = TwoLayers(
        width=spec.width,
        outputs=outputs,
        names=("linear1", "linear2"),
        bias=audio.bool("projection_bias", False),
        activation="relu2",
        norm=("norm", RMS, PROJECTOR_EPS),
        inner=audio.int("projection_hidden_size", 4096, ge=1),
        module="sound_projection",
    )
    return FastConformerTower(scope, scope / "sound_encoder.encoder", spec, projector, ghosts=1)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    if round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0)) != MERGE:
        raise config.wrong("downsample_ratio", "0.5")
    if vision.bool("use_swiglu_ffn", False):
        raise vision.wrong("use_swiglu_ffn", "false")
    ratio = vision.float("mlp_ratio", 4.0, ge=0.0)
    width = vision.int("hidden_size", 1280, ge=1)
    sized = ConfigReader({**vision.raw, "intermediate_size": int(width * ratio)}, vision.where)
    bias = vision.bool("qkv_bias", True)
    layer = tower_layer(sized, DEFAULTS, VisionLayerNames(), bias=bias)
    patch = vision.int("patch_size", 16, ge=1, le=1024)
    side = vision.int("max_img_size", 2048, ge=patch) // patch
    first = vision.int("num_cls_tokens", 3, ge=0) + vision.int("num_registers", 7, ge=0)
    drafts = text.int("num_nextn_predict_layers", 0, ge=0)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=CLIP_MEAN,
            std=CLIP_STD,
            bias=False,
            name="patch_generator.embedder",
            flat=True,
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 32, ge=1),
        projector=TwoLayers(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            merge=MERGE,
            names=("1", "3"),
            bias=False,
            activation="relu2",
            norm=("0", RMS, PROJECTOR_EPS),
            norm_merged=True,
            inner=config.int("projector_hidden_size", 4096, ge=1),
            module="mlp1",
        ),
        table_side=side,
        smooth=False,
        cropped=True,
        positions=("patch_generator.pos_embed", (1, side**2, layer.width)),
        prefix=("patch_generator.cls_token.token", (first, layer.width)) if first else None,
        behind=TowerNorm(name="final", norm=LAYER_NO_WEIGHT) if drafts else None,
        layers_name="blocks",
    )

"""InternVL as its authors publish it (2, 2.5, 3, 3.5): the model of internvl.py under other names
and keys, with the decoder's own under `llm_config`."""

from __future__ import annotations

from headrace.back.layers.norm import LAYER, RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
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
PROJECTOR_EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InternVLChatModel."""
    text, vision = parts_of(config)
    if config.str("ps_version", "v2") != "v2":
        raise config.wrong("ps_version", "v2")
    if config.int("select_layer", -1) != -1:
        raise config.wrong("select_layer", "-1, the last layer")
    tower = PlainTower(scope, scope / "vision_model", _tower(config, text, vision))
    return with_media(scope, text_decoder(scope / "language_model", text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    width = vision.int("hidden_size", 1024, ge=1)
    heads = vision.int("num_attention_heads", 16, ge=1)
    patch, side = square(vision)
    merge = round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0))
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
        bias=vision.bool("qkv_bias", True),
        scaled=("ls1", "ls2"),
        qk_norm=("q_norm", "k_norm") if vision.bool("qk_normalization", False) else None,
        qk_norm_kind=RMS,
        names=VisionLayerNames(),
    )
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=IMAGENET_MEAN, std=IMAGENET_STD, name="embeddings.patch_embedding"
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 24, ge=1),
        projector=TwoLayers(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            merge=merge,
            names=("1", "3"),
            norm=("0", LAYER, PROJECTOR_EPS),
            norm_merged=True,
            module="mlp1",
        ),
        side=side,
        positions=("embeddings.position_embedding", (1, side**2 + 1, width)),
        class_token=("embeddings.class_embedding", (1, 1, width)),
        frames=True,
    )

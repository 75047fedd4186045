"""InternVL (2, 2.5, 3, 3.5) as converted for transformers, Qianfan-OCR, and InternVL as its authors
publish it with the decoder's keys under `llm_config`: tiles of one size through InternViT, windows
of patches side by side, two linear layers (Zhu et al. 2025; a tile is an image of its own, and so
is each frame of a video)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.back.layers.norm import LAYER, RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    LayerDefaults,
    parts_of,
    square,
    text_decoder,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader

NORMS = {"layer_norm": LAYER, "rms_norm": RMS}
DEFAULTS = LayerDefaults(width=1024, heads=16, inner=None, activation="gelu")
PROJECTOR_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class InternLayout:
    """How one form of the checkpoint names its keys and tensors. `layer_key`: of the layer whose
    output is taken; `bias`, `qk_norm`: keys of both, and whether biases are there by default;
    `table`, `class_token`: below `embeddings`; `projector`: the module, its norm and its layers."""

    tower: str
    names: VisionLayerNames
    layers_name: str
    patches: str
    table: str
    class_token: str
    scaled: tuple[str, str]
    layer_key: str
    bias: tuple[str, bool]
    qk_norm: str
    projector: tuple[str, str, tuple[str, str]]


CONVERTED = InternLayout(
    tower="vision_tower",
    names=VisionLayerNames(
        before_attention="layernorm_before",
        before_mlp="layernorm_after",
        attention="attention",
        merged=None,
        out="projection_layer",
    ),
    layers_name="encoder.layer",
    patches="embeddings.patch_embeddings.projection",
    table="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    scaled=("lambda_1", "lambda_2"),
    layer_key="vision_feature_layer",
    bias=("attention_bias", False),
    qk_norm="use_qk_norm",
    projector=("multi_modal_projector", "layer_norm", ("linear_1", "linear_2")),
)
PUBLISHED = InternLayout(
    tower="vision_model",
    names=VisionLayerNames(),
    layers_name="encoder.layers",
    patches="embeddings.patch_embedding",
    table="embeddings.position_embedding",
    class_token="embeddings.class_embedding",
    scaled=("ls1", "ls2"),
    layer_key="select_layer",
    bias=("qkv_bias", True),
    qk_norm="qk_normalization",
    projector=("mlp1", "0", ("1", "3")),
)

BELOW_MODEL = (
    (r"^model\.((?:vision_tower|multi_modal_projector)\..*)", r"\1"),
    (r"^model\.language_model\.(.*)", r"language_model.model.\1"),
    (r"^lm_head\.(.*)", r"language_model.lm_head.\1"),
)
"""How Intern-S1 names what InternVL has."""
LAYOUTS = {
    "InternVLForConditionalGeneration": CONVERTED,
    "InternS1ForConditionalGeneration": CONVERTED,
    **dict.fromkeys(("InternVLChatModel", "SkyworkR1VChatModel"), PUBLISHED),
    "QianfanOCRForConditionalGeneration": replace(
        PUBLISHED,
        layer_key=CONVERTED.layer_key,
        bias=("attention_bias", True),
        qk_norm=CONVERTED.qk_norm,
    ),
}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InternVLForConditionalGeneration, InternS1ForConditionalGeneration,
    QianfanOCRForConditionalGeneration, InternVLChatModel, SkyworkR1VChatModel."""
    text, vision = parts_of(config)
    architecture = config.raw["architectures"][0]
    layout = LAYOUTS[architecture]
    if "ps_version" in config and config.str("ps_version") != "v2":
        raise config.wrong("ps_version", "v2")
    tower = PlainTower(scope, scope / layout.tower, _tower(config, text, vision, layout))
    decoder = text_decoder(scope / "language_model", text)
    return with_media(scope, decoder, tower, renamed=BELOW_MODEL)


def _tower(
    config: ConfigReader, text: ConfigReader, vision: ConfigReader, layout: InternLayout
) -> PlainTowerSpec:
    patch, side = square(vision)
    merge = round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0))
    if config.int(layout.layer_key, -1) != -1:
        raise config.wrong(layout.layer_key, "-1, the last layer")
    if side % merge:
        raise config.wrong("downsample_ratio", f"1 over a divisor of {side} patches a side")
    layer = tower_layer(
        vision,
        DEFAULTS,
        layout.names,
        norm=NORMS[vision.choice("norm_type", NORMS, "layer_norm")],
        bias=vision.bool(*layout.bias),
        scaled=layout.scaled,
        qk_norm=("q_norm", "k_norm") if vision.bool(layout.qk_norm, False) else None,
    )
    module, norm, names = layout.projector
    pools = vision.bool("use_mean_pooling", True)
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=IMAGENET_MEAN, std=IMAGENET_STD, name=layout.patches),
        layer=layer,
        layers=vision.int("num_hidden_layers", 24, ge=1),
        projector=TwoLayers(
            width=layer.width,
            outputs=text.int("hidden_size", ge=1),
            merge=merge,
            names=names,
            activation=ACTIVATIONS[config.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
            norm=(norm, LAYER, PROJECTOR_EPS),
            norm_merged=True,
            module=module,
        ),
        side=side,
        positions=(layout.table, (1, side**2 + 1, layer.width)),
        class_token=(layout.class_token, (1, 1, layer.width)),
        behind=None if pools else TowerNorm(name="layernorm", norm=LAYER),
        layers_name=layout.layers_name,
        frames=True,
    )

"""DeepSeek-VL2: one of DeepSeek's mixtures behind SigLIP's tower, whose odd number of patches a
side is filled up with zeros so that windows of 2 x 2 become tokens; the whole picture, then its
tiles put together again, a learned row behind each row of windows and one between the two (Wu et
al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import HALF, parts_of, square, text_decoder, with_media
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import Packing

UNREAD = (r"vision\.attn_pool\..*",)
"""What makes one vector of an image."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekVLV2ForCausalLM."""
    config.choice("tile_tag", ("2D",), "2D")
    config.choice("global_view_pos", ("head",), "head")
    text, vision = parts_of(config)
    projector = _projector(config, text)
    tower = PlainTower(scope, scope / "vision", _tower(vision, projector))
    decoder = with_media(scope, text_decoder(scope / "language", text), tower)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder


def _projector(config: ConfigReader, text: ConfigReader) -> TwoLayers:
    stated = config.required_section("projector_config")
    stated.choice("projector_type", ("downsample_mlp_gelu",), "downsample_mlp_gelu")
    if stated.bool("token_pooling", False):
        raise stated.wrong("token_pooling", "false")
    if stated.int("depth", 2) != 2:
        raise stated.wrong("depth", "2 layers")
    outputs = text.int("hidden_size", ge=1)
    if stated.int("n_embed", 2048) != outputs:
        raise stated.wrong("n_embed", f"hidden_size of the text ({outputs})")
    return TwoLayers(
        width=stated.int("input_dim", 1152, ge=1),
        outputs=outputs,
        merge=stated.int("downsample_ratio", 2, ge=1, le=16),
        names=("layers.0", "layers.2"),
        by_channel=True,
        inner=outputs * stated.int("mlp_ratio", 1, ge=1),
        module="projector",
    )


def _tower(vision: ConfigReader, projector: TwoLayers) -> PlainTowerSpec:
    """As timm has SigLIP's."""
    if vision.bool("class_token", False):
        raise vision.wrong("class_token", "false")
    sized = {"image_size": 384, "patch_size": 16, **vision.raw}
    patch, side = square(ConfigReader(sized, vision.where))
    width, heads = vision.int("width", 1024, ge=1), vision.int("heads", 16, ge=1)
    if width % heads:
        raise vision.wrong("heads", f"a divisor of width ({width})")
    if width != projector.width:
        raise vision.wrong("width", f"input_dim of projector_config ({projector.width})")
    layer = VisionLayerSpec(
        width=width,
        inner=int(width * vision.float("mlp_ratio", 4.0, ge=0.0)),
        heads=heads,
        head_dim=width // heads,
        eps=1e-6,
        activation="gelu_tanh",
        norm=LAYER,
        names=VisionLayerNames(),
    )
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=HALF, std=HALF),
        layer=layer,
        layers=vision.int("layers", 24, ge=1),
        projector=projector,
        side=side,
        filled=-side % projector.merge,
        positions=("pos_embed", (1, side**2, width)),
        behind=TowerNorm(name="norm", norm=LAYER),
        layers_name="blocks",
        frames=True,
        packings={"image": Packing(newline=True, tails=True)},
        learned=("image_newline", "view_seperator"),
    )

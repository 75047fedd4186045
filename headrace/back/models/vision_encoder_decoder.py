"""A vision transformer as the encoder, and BART's or mBART's decoder: TrOCR (Li et al. 2021), Donut
(Kim et al. 2022), Nougat (Blecher et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import PositionsSpec, SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.merger import NoProjector
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.layers.vision.swin import SwinSpec, SwinTower
from headrace.back.models.bart import CROSS_NAMES, MLP, NORMS, half_sizes, learned
from headrace.back.models.crossing_layer import plain_cross_layer
from headrace.back.models.encoder import TokenLayer
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.back.models.vision import (
    ACTIVATIONS,
    HALF,
    LayerDefaults,
    seeing,
    square,
    tower_layer,
)
from headrace.base.config.hf import ConfigReader

NAMES = VisionLayerNames(
    before_attention="layernorm_before",
    before_mlp="layernorm_after",
    attention="attention",
    merged=None,
    qkv=("attention.query", "attention.key", "attention.value"),
    out="output.dense",
    mlp_module="",
    mlp=("intermediate.dense", "output.dense"),
)
DEFAULTS = LayerDefaults(eps=1e-12, activation="gelu")
HEADS: Mapping[str, str] = {"trocr": "decoder.output_projection", "mbart": "decoder.lm_head"}
"""By the decoder's `model_type`."""
IGNORED = (
    r"encoder\.pooler\..*",
    r"encoder\..*\.relative_position_index",
    r"decoder\.model\.decoder\.embed_positions\.(weights|_float_tensor)",
    r"decoder\.model\.decoder\.version",
)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """VisionEncoderDecoderModel."""
    sees, says = config.required_section("encoder"), config.required_section("decoder")
    tower = TOWERS[sees.choice("model_type", TOWERS)](scope / "encoder", sees)
    kind = says.choice("model_type", HEADS)
    sizes = half_sizes(says, "decoder")
    source = says.int("cross_attention_hidden_size", None, ge=1)
    if source not in (None, tower.width):
        raise says.wrong("cross_attention_hidden_size", f"the encoder's width ({tower.width})")
    leads = source is None and tower.width != sizes.width
    if leads:
        source = sizes.width
    layer = plain_cross_layer(
        scope,
        sizes,
        bias=True,
        cross=CROSS_NAMES,
        feed_forward=MLP,
        norms=NORMS,
        post=kind == "trocr",
        source=source or tower.width,
    )
    normed = says.bool("layernorm_embedding", True) or kind == "mbart"
    head = HEADS[kind]
    return EncoderDecoder(
        scope,
        EncoderDecoderSpec(
            sizes=sizes,
            encoder_layers=0,
            encoder_layer=_no_layer,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            encoder=StackSpec(stack="encoder"),
            decoder=StackSpec(
                stack="decoder",
                embedding_norm="layernorm_embedding" if normed else None,
                norm="layer_norm" if kind == "mbart" else None,
                positions=_positions(says),
            ),
            media=seeing(scope, tower),
            only_seen=True,
            between=partial(_leading, scope, tower.width, sizes.width) if leads else None,
            embedding_scale=sizes.width**0.5 if says.bool("scale_embedding", False) else 1.0,
            prefix="decoder.model",
            shared="decoder.embed_tokens",
            head=None if sizes.tied else head,
            ignored=(*IGNORED, *((head.replace(".", r"\.") + r"\.weight",) if sizes.tied else ())),
        ),
    )


def _no_layer(scope: Scope, index: int) -> TokenLayer:
    raise AssertionError("the tower is all of the encoder")


def _positions(says: ConfigReader) -> PositionsSpec:
    if says.bool("use_learned_position_embeddings", True):
        return learned(says)
    return SinusoidalPositions(first=says.int("pad_token_id", 1, ge=0) + 1, spread=1)


def _leading(whole: Scope, inputs: int, outputs: int, inside: Scope) -> Leading:
    return Leading(whole, inputs, outputs)


class Leading:
    """`EncoderBridge`: a linear layer to the decoder's width."""

    def __init__(self, scope: Scope, inputs: int, outputs: int) -> None:
        self._linear = WholeLinear(scope / "enc_to_dec_proj", inputs, outputs, bias=True)

    def cross(self, x_SD: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """See EncoderBridge."""
        y_SE: torch.Tensor = self._linear.project(x_SD)
        return y_SE


def _vit(scope: Scope, vision: ConfigReader, *, distilled: bool) -> MediaEncoder:
    """ViT (Dosovitskiy et al. 2020) with all its rows, or DeiT (Touvron et al. 2020), which has a
    second token beside them."""
    patch, side = square(vision)
    layer = tower_layer(vision, DEFAULTS, NAMES, bias=vision.bool("qkv_bias", True))
    tokens = 1 + distilled
    one = (1, 1, layer.width)
    spec = PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=HALF, std=HALF, name="embeddings.patch_embeddings.projection"
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 12, ge=1),
        projector=NoProjector(outputs=layer.width),
        side=side,
        positions=("embeddings.position_embeddings", (1, side**2 + tokens, layer.width)),
        class_token=("embeddings.cls_token", one),
        second=("embeddings.distillation_token", one) if distilled else None,
        class_kept=True,
        behind=TowerNorm(name="layernorm", norm=LAYER),
        rows_each=side**2 + tokens,
        layers_name="encoder.layer",
    )
    return PlainTower(scope, scope, spec)


def _swin(scope: Scope, vision: ConfigReader) -> MediaEncoder:
    if vision.bool("use_absolute_embeddings", False):
        raise vision.wrong("use_absolute_embeddings", "false")
    depths = vision.list("depths", [2, 2, 6, 2], of=int)
    heads = vision.list("num_heads", [3, 6, 12, 24], of=int, length=len(depths))
    width, patch = vision.int("embed_dim", 96, ge=1), vision.int("patch_size", 4, ge=1, le=64)
    for i, count in enumerate(heads):
        if count < 1 or width * 2**i % count:
            raise vision.wrong("num_heads", f"divisors of {width * 2**i} in stage {i}")
    square_side = patch * 2 ** (len(depths) - 1)
    size = vision.raw.get("image_size", 224)
    height, across = size if isinstance(size, list) else (size, size)
    window = vision.int("window_size", 7, ge=2, le=256)
    if height % square_side or across % square_side or min(height, across) < square_side * window:
        raise vision.wrong(
            "image_size", f"multiples of {square_side} pixels, {square_side * window} at least"
        )
    return SwinTower(
        scope,
        SwinSpec(
            width=width,
            ratio=vision.float("mlp_ratio", 4.0, ge=0.1),
            patch=patch,
            depths=depths,
            heads=heads,
            window=window,
            eps=vision.float("layer_norm_eps", 1e-5, ge=0.0),
            activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu")],
            bias=vision.bool("qkv_bias", True),
            squares=PatchSpec(patch=square_side, mean=HALF, std=HALF),
            grid=(height // square_side, across // square_side),
        ),
    )


TOWERS: Mapping[str, Callable[[Scope, ConfigReader], MediaEncoder]] = {
    "vit": partial(_vit, distilled=False),
    "deit": partial(_vit, distilled=True),
    "donut-swin": _swin,
}
"""By the encoder's `model_type`."""

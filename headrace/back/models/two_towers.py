"""CLIP (Radford et al. 2021), MetaCLIP 2 (Chuang et al. 2025), SigLIP (Zhai et al. 2023) and SigLIP
2 (Tschannen et al. 2025): a tower for texts and one for images, whose vectors can be compared. An
image is a prompt of one token, in whose place its vector stands behind the text's layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Dense
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LAYER, LayerNorm
from headrace.back.layers.position_bias import CausalBias
from headrace.back.layers.positions import LearnedPositions
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.attention_pool import AttentionPoolSpec
from headrace.back.layers.vision.merger import OneLayer
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.encoder import Encoder, EncoderLayer, EncoderSizes, SpanAttentionLayer
from headrace.back.models.vision import (
    ACTIVATIONS,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    parts_of,
    siglip_layer,
    siglip_tower,
    square,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision
from headrace.base.config.two_towers import is_clip

MLP = PlainMLPSpec(up="fc1", down="fc2", bias=True)
UNREAD = (r"logit_scale", r"logit_bias", r".*\.embeddings\.position_ids")
RENAMED = ((r"(.*\.head\.attention)\.in_proj_(weight|bias)", r"\1.qkv.\2"),)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """CLIPModel, MetaClip2Model, SiglipModel, Siglip2Model."""
    text, vision = parts_of(config)
    clip = is_clip(config.raw)
    within = scope / "vision_model"
    if clip:
        tower = PlainTower(scope, within, _clip_tower(config, vision))
    else:
        tower = PlainTower(scope, within, _siglip_tower(vision))
    encoder = _text_tower(scope, config, text, clip=clip)
    encoder.media = tower
    encoder.weights = replace(encoder.weights, renamed=RENAMED)
    scope.ledger.note(Decision("model.parts", "auto", "text, image", "what the checkpoint takes"))
    return encoder


def _clip_tower(config: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    """The class token becomes the image's vector."""
    patch, side = square(vision)
    layer = siglip_layer(vision)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=CLIP_MEAN,
            std=CLIP_STD,
            bias=False,
            name="embeddings.patch_embedding",
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", ge=1),
        projector=OneLayer(
            width=layer.width,
            outputs=config.int("projection_dim", 512, ge=1),
            merge=1,
            name="visual_projection",
        ),
        side=side,
        positions=("embeddings.position_embedding.weight", (side**2 + 1, layer.width)),
        class_token=("embeddings.class_embedding", (layer.width,)),
        class_alone=True,
        before=TowerNorm(name="pre_layrnorm", norm=LAYER),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
        rows_each=1,
    )


def _siglip_tower(vision: ConfigReader) -> PlainTowerSpec:
    """All patches are pooled by attention; of SigLIP 2 at any ratio."""
    if not vision.bool("vision_use_head", True):
        raise vision.wrong("vision_use_head", "true")
    layer = siglip_layer(vision)
    pool = AttentionPoolSpec(layer=layer, name="vision_model.head")
    if vision.raw.get("image_size") is not None:
        return replace(siglip_tower(vision, pool, layer), rows_each=1)
    side = int(vision.int("num_patches", 256, ge=1) ** 0.5)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 16, ge=1, le=1024),
            mean=HALF,
            std=HALF,
            name="embeddings.patch_embedding",
            linear=True,
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", ge=1),
        projector=pool,
        table_side=side,
        positions=("embeddings.position_embedding.weight", (side**2, layer.width)),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
        rows_each=1,
    )


def _text_tower(scope: Scope, config: ConfigReader, text: ConfigReader, *, clip: bool) -> Encoder:
    """CLIP's tokens see those before them alone; the last one's vector is the text's."""
    heads = text.int("num_attention_heads", ge=1)
    sizes = EncoderSizes(
        vocabulary=text.int("vocab_size", ge=1),
        width=text.int("hidden_size", ge=1),
        inner=text.int("intermediate_size", ge=1),
        layers=text.int("num_hidden_layers", ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=text.int("hidden_size", ge=1) // heads,
        eps=text.float("layer_norm_eps", ge=0.0),
        activation=ACTIVATIONS[text.choice("hidden_act", ACTIVATIONS)],
    )
    inside = scope / "text_model"
    longest = text.int("max_position_embeddings", ge=1)
    words = TokenEmbedding(inside / "embeddings.token_embedding", sizes.vocabulary, sizes.width)
    places = LearnedPositions(name="position_embedding", rows=longest)
    positions = places.build(inside / "embeddings", sizes.width)
    bias = CausalBias(scope, heads, reach=longest) if clip else None
    layers = [
        _layer(inside / "encoder.layers" / str(index), sizes, bias) for index in range(sizes.layers)
    ]
    norm = LayerNorm(inside / "final_layer_norm", sizes.width, eps=sizes.eps)
    if clip:
        outputs = config.int("projection_dim", 512, ge=1)
        head = Dense(scope / "text_projection", sizes.width, outputs, bias=False)
    else:
        outputs = text.int("projection_size", sizes.width, ge=1)
        head = Dense(inside / "head", sizes.width, outputs, bias=True)

    def embed(batch: Batch) -> torch.Tensor:
        return words.lookup(batch.token_ids_T) + positions.lookup(batch.positions_T)

    def behind(x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        y_TP = head.project(x_TE)
        if batch.encoded is not None:
            y_TP = batch.encoded.put(y_TP)
        return y_TP

    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=layers,
        norm=norm,
        classifier=None,
        ignored=UNREAD,
        behind=behind,
    )


def _layer(scope: Scope, sizes: EncoderSizes, bias: CausalBias | None) -> EncoderLayer:
    return EncoderLayer(
        before_attention=LayerNorm(scope / "layer_norm1", sizes.width, eps=sizes.eps),
        attention=SpanAttentionLayer(
            scope / "self_attn",
            sizes,
            names=("q_proj", "k_proj", "v_proj"),
            out="out_proj",
            position_bias=bias,
        ),
        before_mlp=LayerNorm(scope / "layer_norm2", sizes.width, eps=sizes.eps),
        mlp=PlainMLP(
            scope / "mlp", MLP, sizes.feed_forward, ElementwiseActivation(scope, sizes.activation)
        ),
    )

"""Idefics 2: Mistral's decoder behind SigLIP's layers, each patch at the place that its share of
the image falls into, and learned queries that read all patches (Laurençon et al. 2024; transformers
5.23, modeling_idefics2.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.perceiver import GatedLayerSpec, PerceiverSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    HALF,
    parts_of,
    siglip_layer,
    square,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Idefics2ForConditionalGeneration."""
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "model.vision_model", _tower(config, text, vision))
    inside = replace(scope, base_within="model.text_model")
    return with_media(scope, text_decoder(inside, text), tower)


def _tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    patch, side = square(vision)
    layer = siglip_layer(vision)
    queries = _queries(config, text, layer.width)
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=HALF, std=HALF, name="embeddings.patch_embedding"),
        layer=layer,
        layers=vision.int("num_hidden_layers", 12, ge=1),
        projector=queries,
        table_side=side,
        shares=True,
        positions=("embeddings.position_embedding.weight", (side**2, layer.width)),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
        rows_each=queries.queries,
    )


def _queries(config: ConfigReader, text: ConfigReader, inputs: int) -> PerceiverSpec:
    values = config.section("perceiver_config") or ConfigReader({}, config.where)
    width = text.int("hidden_size", ge=1)
    if values.int("hidden_size", width) != width:
        raise values.wrong("hidden_size", f"the decoder's width ({width})")
    heads = values.int("resampler_n_heads", 16, ge=1)
    kv_heads = values.int("num_key_value_heads", 4, ge=1)
    if heads % kv_heads:
        raise values.wrong("num_key_value_heads", f"a divisor of {heads} heads")
    before = GatedLayerSpec(
        inputs=inputs,
        inner=text.int("intermediate_size", 14_336, ge=1),
        outputs=width,
        activation=ACTIVATIONS[text.choice("hidden_act", ACTIVATIONS, "silu")],
    )
    return PerceiverSpec(
        before=before,
        queries=values.int("resampler_n_latents", 64, ge=1, le=4096),
        layers=values.int("resampler_depth", 3, ge=1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=values.int("resampler_head_dim", 96, ge=1),
        eps=values.float("rms_norm_eps", 1e-6, ge=0.0),
        activation=ACTIVATIONS[values.choice("hidden_act", ACTIVATIONS, "silu")],
        name="model.connector",
    )

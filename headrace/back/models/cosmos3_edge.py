"""Cosmos 3 Edge with images: Llama's decoder with squared ReLU and positions in three axes that
take turns, behind SigLIP 2's tower at any size and two layers for each window (NVIDIA 2026;
transformers 5.23, modeling_cosmos3_edge.py). What makes pictures is not read."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.qwen3_vl import qwen3_axes
from headrace.back.models.vision import HALF, parts_of, siglip_layer, with_media
from headrace.base.config.hf import ConfigReader

THETA = 100_000_000.0
PROJECTOR_EPS = 1e-6
RENAMED = (
    (r"^(embed_tokens|norm|layers)\.", r"model.language_model.\1."),
    (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
)
"""Published names."""
UNREAD = (
    r"(model\.language_model\.)?(action_|time_embedder|proj_in|proj_out|norm_moe_gen).*",
    r".*\.(input_layernorm|post_attention_layernorm|mlp)_moe_gen\..*",
    r".*\.self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|k_norm_und_for_gen)\..*",
)
"""Of what makes pictures and actions."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Cosmos3EdgeForConditionalGeneration."""
    text, vision = parts_of(config)
    sizes = read_sizes(text, gated=False, default_activation="relu2", eps=1e-5)
    bias = text.bool("attention_bias", False)
    rope = read_rope(
        text,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=THETA,
    )
    layer = LayerSpec(
        mixer=AttentionSpec(**plain_attention(sizes), rope=rope, qkv_bias=bias, out_bias=bias),
        feed_forward=PlainMLPSpec(up="fc1", down="fc2", bias=text.bool("mlp_bias", False)),
    )
    axes = qwen3_axes(scope, text, vision, head_dim=sizes.head_dim, theta=THETA)
    within = scope / "model"
    spec = _tower(config, vision, sizes.width)
    tower = PlainTower(within, within / "visual", spec, axes)
    inside = replace(scope, base_within="model.language_model")
    decoder = Decoder(inside, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
    decoder = with_media(scope, decoder, tower, renamed=RENAMED)
    weights = decoder.weights
    decoder.weights = replace(weights, ignored=(*weights.ignored, *UNREAD))
    return decoder


def _tower(config: ConfigReader, vision: ConfigReader, outputs: int) -> PlainTowerSpec:
    layer = siglip_layer(vision, default_width=1152, default_heads=16)
    patches = vision.int("num_patches", 256, ge=1)
    side = int(patches**0.5)
    if side**2 != patches:
        raise vision.wrong("num_patches", "a square")
    patch = vision.int("patch_size", 16, ge=1, le=1024)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch, mean=HALF, std=HALF, linear=True, name="embeddings.patch_embedding"
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 27, ge=1),
        projector=TwoLayers(
            width=layer.width,
            outputs=outputs,
            merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
            inner=config.int("projector_hidden_size", 11_520, ge=1),
            names=("linear_fc1", "linear_fc2"),
            norm=("norm", LAYER, PROJECTOR_EPS),
            module="projector",
        ),
        table_side=side,
        positions=("embeddings.position_embedding.weight", (patches, layer.width)),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
    )

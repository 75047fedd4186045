"""Persimmon: squared ReLU, a layer norm over each query and key, half of each head rotated."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.qk_norm import QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(norm="final_layernorm")
ATTENTION = AttentionNames(merged="query_key_value", by_group=True, out="dense")
QK_NAMES = ("q_layernorm", "k_layernorm")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PersimmonForCausalLM."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(config, kv_heads=heads, gated=False, default_activation="relu2", eps=1e-5)
    qk_norm = None
    if config.bool("qk_layernorm", True):
        qk_norm = QKNorm(norm=LAYER, eps=sizes.eps, names=QK_NAMES)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=25_000.0,
        default_share=0.5,
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            qkv_bias=True,
            out_bias=True,
            qk_norm=qk_norm,
            names=ATTENTION,
        ),
        feed_forward=PlainMLPSpec(up="dense_h_to_4h", down="dense_4h_to_h", bias=True),
    )
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER, names=NAMES),
    )

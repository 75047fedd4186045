"""Bloom: layer norms, one of them over the embeddings, ALiBi, query, key and value in one tensor
head by head."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, PRE
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

NAMES = DecoderNames(
    prefix="transformer",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    layers="h",
    norm="ln_f",
)
ATTENTION = AttentionNames(
    module="self_attention", merged="query_key_value", by_group=True, out="dense"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BloomForCausalLM. `apply_residual_connection_post_layernorm`: a branch is added to what its
    norm gives."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config, gated=False, default_activation="gelu_new", eps=1e-5, tied=True, kv_heads=heads
    )
    sizes = replace(sizes, inner=4 * sizes.width)
    behind_norm = config.bool("apply_residual_connection_post_layernorm", False)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=None,
            slopes=alibi_slopes(heads),
            qkv_bias=True,
            out_bias=True,
            names=ATTENTION,
        ),
        placement=PRE,
        feed_forward=PlainMLPSpec(up="dense_h_to_4h", down="dense_4h_to_h", bias=True),
        normed_residual=(1.0, 1.0) if behind_norm else None,
    )
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER, names=NAMES),
    )

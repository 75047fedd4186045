"""Ling and Ring 1, 1.5 and 2 (Bailing MoE): query, key and value in one tensor, dense layers first,
then experts, by softmax scores or, since version 2, routed as DeepSeek-V3 routes them (Ling team
2025; names and keys of the published checkpoints)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.moe import (
    dense_first,
    draft_layers,
    feed_forwards,
    routed_mixture,
    sigmoid_mixture,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(embedding="word_embeddings")
ATTENTION = AttentionNames(module="attention", merged="query_key_value", out="dense")
QK_NAMES = ("query_layernorm", "key_layernorm")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BailingMoeForCausalLM, BailingMoeV2ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    if config.bool("norm_head", False):
        raise config.wrong("norm_head", "false")
    attention = bailing_attention(scope, config, sizes)
    sparse = dense_first(config, sizes.layers)
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=feed_forward)
        for feed_forward in feed_forwards(bailing_mixture(config), sparse)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES, ignored=ignored))


def bailing_attention(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> AttentionSpec:
    """Softmax attention with groups of queries."""
    qk_norm = None
    if config.bool("use_qk_norm", False):
        qk_norm = QKNorm(eps=sizes.eps, names=QK_NAMES)
    return AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        qkv_bias=config.bool("use_qkv_bias", False),
        out_bias=config.bool("use_bias", False),
        qk_norm=qk_norm,
        names=ATTENTION,
    )


def bailing_mixture(config: ConfigReader) -> MixtureSpec:
    """By softmax scores, or as DeepSeek-V3 routes."""
    if config.choice("score_function", ("softmax", "sigmoid"), "softmax") == "sigmoid":
        return sigmoid_mixture(config, bias_name="gate.expert_bias")
    mixture = routed_mixture(config, grouped=False)
    renormalized = config.bool("norm_topk_prob", True)
    return replace(mixture, router=replace(mixture.router, renormalize=renormalized))

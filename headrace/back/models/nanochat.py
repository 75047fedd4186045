"""NanoChat: norms without weights, also over the embeddings and behind the rotation of queries and
keys, squared ReLU, capped logits."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import RMS_NO_WEIGHT
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
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(embedding_norm="norm")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """NanoChatForCausalLM. Its rotation turns the other way."""
    sizes = read_sizes(config, gated=False, default_activation="relu2", eps=1e-6)
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    turned = replace(rope, frequencies=tuple(-frequency for frequency in rope.frequencies))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=turned,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(norm=RMS_NO_WEIGHT, eps=sizes.eps, after_rope=True),
        ),
        feed_forward=PlainMLPSpec(up="fc1", down="fc2"),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=RMS_NO_WEIGHT,
            logits_softcap=config.float("final_logit_softcapping", None, ge=1e-3),
            names=NAMES,
        ),
    )

"""Grok 1 (xAI 2024) and 2 (2025): capped scores, four norms, two of eight experts by a softmax over
all of them, and since the second a dense MLP beside these.

The names are those of Grok 2's checkpoint, with its shards joined.
"""

from __future__ import annotations

import math

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import FeedForwardSpec, GatedMLPSpec, SummedSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.mixtral import LAYOUT
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(
    before_attention="pre_attn_norm",
    after_attention="post_attn_norm",
    before_mlp="pre_moe_norm",
    after_mlp="post_moe_norm",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Grok1ForCausalLM, Grok1ModelForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, default_activation="gelu_pytorch_tanh")
    attention = plain_attention(sizes)
    attention["scale"] = config.float("attn_output_multiplier", sizes.head_dim**-0.5, ge=0.0)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **attention,
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            softcap=config.float("attn_logit_softcapping", 30.0, ge=0.0) or None,
            late_length=max(0, config.int("attn_temperature_len", 0)),
        ),
        placement=PLACEMENT,
        feed_forward=_feed_forward(config, sizes),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            embedding_scale=config.float("embedding_multiplier_scale", 78.38367176906169),
            logits_scale=config.float("output_multiplier_scale", 0.5773502691896257),
            logits_softcap=config.float("final_logit_softcapping", 0.0, ge=0.0) or None,
        ),
    )


def _feed_forward(config: ConfigReader, sizes: DecoderSizes) -> FeedForwardSpec:
    """Two of the experts, or their mean with a dense MLP, times the square root of two."""
    beside = config.bool("residual_moe", False)
    share = math.sqrt(0.5) if beside else 1.0
    experts = config.int("num_local_experts", 8, ge=1, aliases=("num_experts",))
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 2, ge=1, le=experts),
            softcap=config.float("router_logit_softcapping", 30.0, ge=0.0),
            scale=share,
        ),
        inner=config.int("moe_intermediate_size", sizes.inner, ge=1),
        layout=LAYOUT,
        name="block_sparse_moe",
    )
    return SummedSpec(experts=mixture, beside=GatedMLPSpec(down_scale=share)) if beside else mixture

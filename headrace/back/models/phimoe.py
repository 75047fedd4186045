"""Phi-3.5-MoE: Mixtral's decoder with layer norms, biases, and two experts chosen one after another
among logits near the best (sparsemixer)."""

from __future__ import annotations

from headrace.back.kernels.route.op import SPARSEMIXER
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.mixtral import LAYOUT
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PhimoeForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    bias = config.bool("attention_bias", False)
    experts = config.int("num_local_experts", 16, ge=2)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            window=config.int("sliding_window", None, ge=1),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=config.int("num_experts_per_tok", 2, ge=2, le=2),
                score=SPARSEMIXER,
                jitter=config.float("router_jitter_noise", 0.01, ge=0.0),
            ),
            inner=sizes.inner,
            layout=LAYOUT,
            name="block_sparse_moe",
        ),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            logits_bias=config.bool("lm_head_bias", False),
        ),
    )

"""Granite 3 with experts: its multipliers, and the weights of the chosen experts as a softmax of
their own."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import MergedExperts
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader

LAYOUT = MergedExperts(up="input_linear.weight", down="output_linear.weight")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteMoeForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    experts = config.int("num_local_experts", 8, ge=1)
    scale = config.float("attention_multiplier", 1.0)
    layer = LayerSpec(
        attention=AttentionSpec(
            **{**plain_attention(sizes), "scale": scale},
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=config.int("num_experts_per_tok", 2, ge=1, le=experts),
                softmax_chosen=True,
                name="router.layer",
            ),
            inner=sizes.inner,
            layout=LAYOUT,
            name="block_sparse_moe",
        ),
        branch_scale=config.float("residual_multiplier", 1.0),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            embedding_scale=config.float("embedding_multiplier", 1.0),
            logits_scale=1.0 / config.float("logits_scaling", 1.0, ge=1e-6),
        ),
    )

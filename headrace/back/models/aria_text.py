"""Aria's decoder: Llama's, with experts in every layer, whose weights are a softmax of the chosen
ones, beside shared ones (Li et al. 2024)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.moe.weights import TransposedExperts
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader

LAYOUT = TransposedExperts(up="experts.fc1.weight", down="experts.fc2.weight")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """The text part of AriaForConditionalGeneration."""
    sizes = read_sizes(config)
    if config.bool("mlp_bias", False):
        raise config.wrong("mlp_bias", "false")
    bias = config.bool("attention_bias", False)
    experts = config.int("moe_num_experts", 8, ge=1)
    shared = config.int("moe_num_shared_experts", 2, ge=1)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=config.int("moe_topk", 2, ge=1, le=experts),
                softmax_chosen=True,
                name="router",
            ),
            inner=sizes.inner,
            layout=LAYOUT,
            shared=SharedSpec(inner=sizes.inner * shared),
        ),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

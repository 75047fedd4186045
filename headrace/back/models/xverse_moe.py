"""XVERSE with experts: Llama's attention, fine-grained experts routed by softmax, beside shared
ones, in every layer."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """XverseMoeForCausalLM. `intermediate_size` is that of an expert. The weights of the chosen add
    up to 1 unless the config says otherwise."""
    sizes = read_sizes(config)
    experts = config.int("num_experts", ge=1)
    shared = config.int("num_shared_experts", None, ge=0) or 0
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("moe_top_k", ge=1, le=experts),
            renormalize=config.bool("norm_topk_prob", True),
            name="router",
        ),
        inner=sizes.inner,
        shared=SharedSpec(inner=sizes.inner * shared) if shared else None,
    )
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
    )
    layers = (LayerSpec(mixer=attention, feed_forward=mixture),) * sizes.layers
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))

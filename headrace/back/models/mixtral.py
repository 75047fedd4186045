"""Mixtral: Mistral's decoder with a mixture of experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import SeparateExperts
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader

LAYOUT = SeparateExperts(
    gate="experts.{}.w1.weight", up="experts.{}.w3.weight", down="experts.{}.w2.weight"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MixtralForCausalLM. The weights of the chosen experts are made to add up to 1."""
    sizes = read_sizes(config, eps=1e-5)
    experts = config.int("num_local_experts", ge=1)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            window=config.int("sliding_window", None, ge=1),
        ),
        feed_forward=MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=config.int("num_experts_per_tok", 2, ge=1, le=experts),
                renormalize=True,
            ),
            inner=sizes.inner,
            layout=LAYOUT,
            name="block_sparse_moe",
        ),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

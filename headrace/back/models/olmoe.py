"""OLMoE: Llama's decoder with norms over all queries and keys, and 64 small experts (Muennighoff et
al. 2024)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.norm import PRE, NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OlmoeForCausalLM."""
    return olmoe_decoder(scope, config, placement=PRE)


def olmoe_decoder(scope: Scope, config: ConfigReader, *, placement: NormPlacement) -> Decoder:
    """The decoder, with its norms at `placement`."""
    sizes = read_sizes(config, eps=1e-5)
    if config.float("clip_qkv", None) is not None:
        raise config.wrong("clip_qkv", "null: projections that are clipped behind their norm")
    bias = config.bool("attention_bias", False)
    experts = config.int("num_experts", 64, ge=1, aliases=("num_local_experts",))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(over="width", eps=sizes.eps),
        ),
        feed_forward=MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=config.int("num_experts_per_tok", 8, ge=1, le=experts),
                renormalize=config.bool("norm_topk_prob", False),
            ),
            inner=sizes.inner,
        ),
        placement=placement,
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

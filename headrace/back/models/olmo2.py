"""OLMo 2: norms after both branches and none before, a norm over all query heads and one over all
key heads."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import POST
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Olmo2ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    bias = config.bool("attention_bias", False)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(over="width", eps=sizes.eps),
        ),
        placement=POST,
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

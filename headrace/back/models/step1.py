"""Step 1, the text part of Step-Audio (Huang et al. 2025): Llama's decoder without rotations, whose
scores fall with the square root of the distance of two tokens, by the slopes of ALiBi (names and
keys of the published checkpoints)."""

from __future__ import annotations

from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.position_bias import RootBias
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Step1ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    bias = config.bool("attention_bias", False)
    reach = scope.max_positions - 1
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=None,
            qkv_bias=bias,
            out_bias=bias,
            position_bias=RootBias(scope, alibi_slopes(sizes.heads), reach=max(1, reach)),
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

"""GLM-4 (9B, 0520 and later) and GLM-Edge: Llama's decoder; half of each head rotated, in pairs of
neighbours, and gate and up merged."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import PRE, NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GlmForCausalLM."""
    return build_glm(scope, config, PRE)


def build_glm(scope: Scope, config: ConfigReader, placement: NormPlacement) -> Decoder:
    """The same with norms elsewhere."""
    sizes = read_sizes(config, eps=1.5625e-7)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(
                config,
                head_dim=sizes.head_dim,
                max_positions=scope.max_positions,
                default_share=0.5,
                layout="pairs",
            ),
            qkv_bias=config.bool("attention_bias", True),
        ),
        placement=placement,
        feed_forward=GatedMLPSpec(merged="gate_up_proj"),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

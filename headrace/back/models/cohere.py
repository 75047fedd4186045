"""Command R: attention and MLP side by side behind one layer norm without bias, neighbouring
dimensions rotated in pairs; Command R+ has a norm for each head."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import LAYER_NO_BIAS, PARALLEL
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """CohereForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    bias = config.bool("attention_bias", False)
    heads = QKNorm(over="heads", eps=sizes.eps)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(
                config,
                head_dim=sizes.head_dim,
                max_positions=scope.max_positions,
                default_theta=500_000.0,
                layout="pairs",
            ),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=heads if config.bool("use_qk_norm", False) else None,
        ),
        placement=PARALLEL,
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER_NO_BIAS,
            logits_scale=config.float("logit_scale", 0.0625, ge=0.0),
        ),
    )

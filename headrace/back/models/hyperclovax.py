"""HyperCLOVA X SEED Think: Granite's multipliers, norms behind the branches too, logits that are
multiplied and not divided."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import PRE
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader

BEHIND_TOO = replace(PRE, after_attention="post_norm1", after_mlp="post_norm2")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HyperCLOVAXForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    scale = config.float("attention_multiplier", None)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **{**plain_attention(sizes), "scale": scale or sizes.head_dim**-0.5},
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=bias,
            out_bias=bias,
        ),
        placement=BEHIND_TOO if config.bool("use_post_norm", True) else PRE,
        feed_forward=GatedMLPSpec(bias=config.bool("mlp_bias", False)),
        branch_scale=config.float("residual_multiplier", 1.0),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            embedding_scale=config.float("embedding_multiplier", 1.0),
            logits_scale=config.float("logits_scaling", 1.0),
        ),
    )

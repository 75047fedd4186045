"""Bamba: Mamba 2 in most layers, attention with half rotated heads in some."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.ssm import read_mamba2
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(before_attention="input_layernorm", before_mlp="pre_ff_layernorm")
NAMES = DecoderNames(norm="final_layernorm")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BambaForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    attending = config.list("attn_layer_indices", [], of=int)
    if not set(attending) <= set(range(sizes.layers)):
        raise config.wrong("attn_layer_indices", f"indices below {sizes.layers}")
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_share=0.5
    )
    bias = config.bool("attention_bias", False)
    attention = AttentionSpec(**plain_attention(sizes), rope=rope, qkv_bias=bias, out_bias=bias)
    mamba = read_mamba2(config, sizes)
    mlp = GatedMLPSpec(name="feed_forward", bias=config.bool("mlp_bias", False))
    layers = tuple(
        LayerSpec(
            mixer=attention if layer in attending else mamba,
            placement=PLACEMENT,
            feed_forward=mlp,
        )
        for layer in range(sizes.layers)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES))

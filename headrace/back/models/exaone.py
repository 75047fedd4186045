"""EXAONE 3 and 3.5: Llama's decoder under names of its own (LG AI Research 2024; names and keys of
the published checkpoints)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
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
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="transformer", embedding="wte", layers="h", norm="ln_f")
ATTENTION = AttentionNames(module="attn.attention", out="out_proj")
PLACEMENT = NormPlacement(before_attention="ln_1", before_mlp="ln_2")
MLP = GatedMLPSpec(gate="c_fc_0", up="c_fc_1", down="c_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ExaoneForCausalLM."""
    sizes = read_sizes(config, activation=("activation_function",), eps=1e-5)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            names=ATTENTION,
        ),
        placement=PLACEMENT,
        feed_forward=MLP,
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, names=NAMES))

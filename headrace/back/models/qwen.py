"""Qwen 1 (Bai et al. 2023): Llama's decoder under names of its own, query, key and value in one
tensor with a bias (names and keys of the published checkpoints)."""

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
ATTENTION = AttentionNames(module="attn", merged="c_attn", out="c_proj")
PLACEMENT = NormPlacement(before_attention="ln_1", before_mlp="ln_2")
MLP = GatedMLPSpec(gate="w2", up="w1", down="c_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """QWenLMHeadModel, whose sizes stand under common keys besides (published_keys.py)."""
    if not config.bool("no_bias", True):
        raise config.wrong("no_bias", "true")
    if "visual" in config:
        raise config.wrong("visual", "absent: Qwen-VL 1 is not built")
    heads = config.int("num_attention_heads", ge=1)
    sizes = read_sizes(config, kv_heads=heads)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=True,
            names=ATTENTION,
        ),
        placement=PLACEMENT,
        feed_forward=MLP,
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            names=NAMES,
            ignored=(r"transformer\.rotary_emb\.inv_freq",),
        ),
    )

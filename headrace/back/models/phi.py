"""Phi 1, 1.5 and 2: attention and MLP side by side behind one layer norm, half of each head
rotated, a bias everywhere, on the logits too."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, PARALLEL
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


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PhiForCausalLM."""
    sizes = read_sizes(config, gated=False, default_activation="gelu_new", eps=1e-5)
    qk_norm = None
    if config.bool("qk_layernorm", False):
        qk_norm = QKNorm(norm=LAYER, eps=sizes.eps, names=("q_layernorm", "k_layernorm"))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(
                config,
                head_dim=sizes.head_dim,
                max_positions=scope.max_positions,
                default_share=0.5,
            ),
            qkv_bias=True,
            out_bias=True,
            qk_norm=qk_norm,
            names=AttentionNames(out="dense"),
        ),
        placement=PARALLEL,
        feed_forward=PlainMLPSpec(up="fc1", down="fc2", bias=True),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            logits_bias=True,
            names=DecoderNames(norm="final_layernorm"),
        ),
    )

"""GPT-NeoX Japanese (abeja): GPT-NeoX without biases but for one behind the last layer's attention,
one branch after the other."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
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
from headrace.back.models.gpt_neox import ATTENTION, MASKS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(
    prefix="gpt_neox_japanese", embedding="embed_in", norm="final_layer_norm", head="embed_out"
)
RENAMED = ((r"\.attention\.dense_bias$", ".attention.dense.bias"),)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GPTNeoXJapaneseForCausalLM."""
    width = config.int("hidden_size", ge=1)
    wider = config.float("intermediate_multiple_size", 4.0, ge=0.0)
    heads = config.int("num_attention_heads", ge=1)
    sizes = read_sizes(
        config, gated=False, default_activation="gelu", eps=1e-5, tied=True, kv_heads=heads
    )
    sizes = replace(sizes, inner=max(1, int(width * wider)))
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        keys=("rotary_emb_base", "rotary_pct"),
    )
    attention = AttentionSpec(**plain_attention(sizes), rope=rope, names=ATTENTION)
    mlp = PlainMLPSpec(up="dense_h_to_4h", down="dense_4h_to_h", bias=False)
    layers = tuple(
        LayerSpec(mixer=replace(attention, out_bias=layer == sizes.layers - 1), feed_forward=mlp)
        for layer in range(sizes.layers)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=LAYER,
            names=NAMES,
            ignored=(MASKS,),
            renamed=RENAMED,
        ),
    )

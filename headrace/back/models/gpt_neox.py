"""GPT-NeoX and Pythia: layer norms, both branches side by side behind a norm each, a quarter of
each head rotated, query, key and value in one tensor head by head."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, PARALLEL_TWO_NORMS, PRE
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

NAMES = DecoderNames(
    prefix="gpt_neox", embedding="embed_in", norm="final_layer_norm", head="embed_out"
)
ATTENTION = AttentionNames(module="attention", merged="query_key_value", by_group=True, out="dense")
MASKS = r".*\.attention\.(masked_)?bias"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GPTNeoXForCausalLM."""
    heads = config.int("num_attention_heads", ge=1)
    sizes = read_sizes(config, gated=False, default_activation="gelu", eps=1e-5, kv_heads=heads)
    bias = config.bool("attention_bias", True)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_share=0.25,
        keys=("rotary_emb_base", "rotary_pct"),
    )
    parallel = config.bool("use_parallel_residual", True)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes), rope=rope, qkv_bias=bias, out_bias=bias, names=ATTENTION
        ),
        placement=PARALLEL_TWO_NORMS if parallel else PRE,
        feed_forward=PlainMLPSpec(up="dense_h_to_4h", down="dense_4h_to_h", bias=True),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            names=NAMES,
            ignored=(MASKS,),
        ),
    )

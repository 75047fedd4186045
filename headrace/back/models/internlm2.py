"""InternLM 2 and 2.5: Llama's decoder, with query, key and value in one tensor, KV head by KV head
(Cai et al. 2024; names and keys of the published checkpoints)."""

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

NAMES = DecoderNames(embedding="tok_embeddings", head="output")
ATTENTION = AttentionNames(module="attention", merged="wqkv", by_group=True, out="wo")
PLACEMENT = NormPlacement(before_attention="attention_norm", before_mlp="ffn_norm")
MLP = GatedMLPSpec(name="feed_forward", gate="w1", up="w3", down="w2")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InternLM2ForCausalLM, InternLM2VEForCausalLM: the latter's MLPs of images are not read."""
    sizes = read_sizes(config)
    bias = config.bool("bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes), rope=rope, qkv_bias=bias, out_bias=bias, names=ATTENTION
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
            ignored=(r".*\.feed_forward_ve\..*",),
        ),
    )

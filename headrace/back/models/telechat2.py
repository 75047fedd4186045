"""TeleChat 1 and 2 (China Telecom 2024; names and keys of the published checkpoints): Llama's
decoder, keys and values in one tensor head by head, with biases of what leads back alone."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.mlp import GatedMLPSpec
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

NAMES = DecoderNames(prefix="transformer", embedding="word_embeddings", layers="h", norm="ln_f")
MLP = GatedMLPSpec(down_bias=True)
NOT_READ = ("apply_residual_connection_post_layernorm", "embed_layernorm", "logn")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """TeleChat2ForCausalLM, TeleChatForCausalLM."""
    for key in NOT_READ:
        if config.bool(key, False):
            raise config.wrong(key, "false")
    sizes = read_sizes(config, eps=1e-5)
    names = AttentionNames(
        module="self_attention",
        query="query",
        grouped=MergedTensor(name="key_value", parts=(1, 2), groups=sizes.kv_heads),
        out="dense",
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            out_bias=True,
            names=names,
        ),
        feed_forward=MLP,
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, names=NAMES))

"""GPT, the first (Radford et al. 2018): GPT-2 with a norm behind each sum and none behind the
layers."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import LearnedPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.families import HEADS
from headrace.back.models.post_norm_layer import PostNormLayerSpec
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="transformer", embedding="tokens_embed", layers="h", norm=None)
ATTENTION = AttentionNames(module="attn", merged="c_attn", out="c_proj", transposed=True)
IGNORED = (r".*\.attn\.bias", r"transformer\.position_ids", r".*multiple_choice_head\..*")
ACTIVATIONS = {"gelu": "gelu_new", "gelu_new": "gelu_new", "relu": "relu", "silu": "silu"}
"""What its `afn` means elsewhere: its gelu is the one by tanh."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OpenAIGPTLMHeadModel."""
    activation = ACTIVATIONS[config.choice("afn", ACTIVATIONS, "gelu")]
    sizes = read_sizes(
        ConfigReader({**config.raw, "hidden_act": activation}, config.where),
        kv_heads=config.int("num_attention_heads", aliases=HEADS, ge=1),
        gated=False,
        eps=1e-5,
        tied=True,
    )
    sizes = replace(sizes, inner=4 * sizes.width)
    layer = PostNormLayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes), rope=None, qkv_bias=True, out_bias=True, names=ATTENTION
        ),
        feed_forward=PlainMLPSpec(up="c_fc", down="c_proj", bias=True, transposed=True),
        norms=("ln_1", "ln_2"),
    )
    rows = config.int("n_positions", 512, aliases=("max_position_embeddings",), ge=1)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            positions=LearnedPositions(name="positions_embed", rows=rows),
            names=NAMES,
            ignored=IGNORED,
        ),
    )

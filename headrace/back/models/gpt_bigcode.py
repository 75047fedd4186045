"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with one KV head (Li et al. 2023)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.positions import LearnedPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.cached_layers import kv_heads_of
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(before_attention="ln_1", before_mlp="ln_2")
NAMES = DecoderNames(prefix="transformer", embedding="wte", layers="h", norm="ln_f")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GPTBigCodeForCausalLM."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config,
        activation=("activation_function",),
        gated=False,
        default_activation="gelu_pytorch_tanh",
        eps=1e-5,
        tied=True,
        kv_heads=kv_heads_of("gpt_bigcode", config, heads),
    )
    if config.bool("add_cross_attention", False):
        raise config.wrong("add_cross_attention", "false")
    scaled = config.bool("scale_attn_weights", True)
    names = AttentionNames(
        module="attn", merged="c_attn", by_group=sizes.kv_heads == heads, out="c_proj"
    )
    layer = LayerSpec(
        mixer=AttentionSpec(
            **{**plain_attention(sizes), "scale": sizes.head_dim**-0.5 if scaled else 1.0},
            rope=None,
            qkv_bias=True,
            out_bias=True,
            names=names,
        ),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(up="c_fc", down="c_proj", bias=True),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            positions=LearnedPositions(
                name="wpe",
                rows=config.int("n_positions", 1024, aliases=("max_position_embeddings",), ge=1),
            ),
            names=NAMES,
        ),
    )

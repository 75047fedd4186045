"""OPT: layer norms, learned positions behind two unused rows, biases (Zhang et al. 2022)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, LAYER_NO_WEIGHT, NormPlacement
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
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="model.decoder", norm="final_layer_norm")
ATTENTION = AttentionNames(out="out_proj")
PLACEMENT = NormPlacement(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm")
EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OPTForCausalLM, with norms before its branches: the one of 350M has them behind, and smaller
    embeddings."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config,
        kv_heads=heads,
        activation=("activation_function",),
        gated=False,
        default_activation="relu",
        eps=EPS,
        tied=True,
    )
    if not config.bool("do_layer_norm_before", True):
        raise config.wrong("do_layer_norm_before", "true")
    if config.bool("_remove_final_layer_norm", False):
        raise config.wrong("_remove_final_layer_norm", "false")
    if config.int("word_embed_proj_dim", sizes.width, ge=1) != sizes.width:
        raise config.wrong("word_embed_proj_dim", f"hidden_size ({sizes.width})")
    bias = config.bool("enable_bias", True)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes), rope=None, qkv_bias=bias, out_bias=bias, names=ATTENTION
        ),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(name="", up="fc1", down="fc2", bias=bias),
    )
    weighted = config.bool("layer_norm_elementwise_affine", True)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER if weighted else LAYER_NO_WEIGHT,
            positions=LearnedPositions(
                name="embed_positions",
                rows=config.int("max_position_embeddings", 2048, ge=1),
                unused=2,
            ),
            names=NAMES,
        ),
    )

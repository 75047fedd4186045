"""Falcon: layer norms, both branches side by side behind one norm or a norm each, few KV heads,
query, key and value in one tensor group by group, rotations or ALiBi."""

from __future__ import annotations

from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, PARALLEL, PRE, NormPlacement
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
from headrace.back.models.cached_layers import kv_heads_of
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="transformer", embedding="word_embeddings", layers="h", norm="ln_f")
ATTENTION = AttentionNames(
    module="self_attention", merged="query_key_value", by_group=True, out="dense"
)
TWO_NORMS = NormPlacement(before_attention="ln_attn", before_mlp="ln_mlp", parallel=True)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """FalconForCausalLM. ALiBi's bias is scaled together with the scores."""
    alibi = config.bool("alibi", False)
    grouped = config.bool("new_decoder_architecture", False)
    heads = config.int("num_attention_heads", aliases=("n_head",), ge=1)
    sizes = read_sizes(
        config,
        activation=("activation",),
        gated=False,
        default_activation="gelu",
        eps=1e-5,
        tied=True,
        kv_heads=kv_heads_of("falcon", config, heads),
    )
    bias = config.bool("bias", False)
    slopes = tuple(slope * sizes.head_dim**-0.5 for slope in alibi_slopes(heads))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=None
            if alibi
            else read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            slopes=slopes if alibi else (),
            qkv_bias=bias,
            out_bias=bias,
            names=ATTENTION,
        ),
        placement=_placement(config, grouped=grouped),
        feed_forward=PlainMLPSpec(up="dense_h_to_4h", down="dense_4h_to_h", bias=bias),
    )
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER, names=NAMES),
    )


def _placement(config: ConfigReader, *, grouped: bool) -> NormPlacement:
    if not config.bool("parallel_attn", True):
        return PRE
    norms = config.int("num_ln_in_parallel_attn", 2 if grouped else 1, ge=1, le=2)
    return TWO_NORMS if norms == 2 else PARALLEL

"""LFM2: short convolutions between gates, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.short_conv import GatedConvSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.hybrid import MAX_TAPS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(norm="embedding_norm")
PLACEMENT = NormPlacement(before_attention="operator_norm", before_mlp="ffn_norm")
ATTENTION = AttentionNames(out="out_proj")
MLP = GatedMLPSpec(name="feed_forward", gate="w1", up="w3", down="w2")
CONV, ATTENDS = "conv", "full_attention"
THETA = 1_000_000.0


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Lfm2ForCausalLM."""
    sizes = lfm2_sizes(config)
    mlp = replace(MLP, inner=_inner(config, sizes.inner))
    layers = tuple(
        LayerSpec(mixer=mixer, placement=PLACEMENT, feed_forward=mlp)
        for mixer in lfm2_mixers(scope, config, sizes)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES))


def lfm2_sizes(config: ConfigReader) -> DecoderSizes:
    """The common sizes; embeddings are tied unless the config says otherwise."""
    tied = config.bool("tie_embedding", True)
    return read_sizes(config, eps=1e-5, tied=tied, inner=config.int("block_ff_dim", None, ge=1))


def lfm2_mixers(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> tuple[MixerSpec, ...]:
    """Each layer's mixer: by `layer_types`, else attention where `full_attn_idxs` says so."""
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            default_theta=THETA,
        ),
        qk_norm=QKNorm(eps=sizes.eps, names=("q_layernorm", "k_layernorm")),
        names=ATTENTION,
    )
    taps = config.int("conv_L_cache", 3, ge=2, le=MAX_TAPS)
    conv = GatedConvSpec(width=sizes.width, taps=taps, bias=config.bool("conv_bias", False))
    return tuple(conv if kind == CONV else attention for kind in _kinds(config, sizes.layers))


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    types = config.list("layer_types", None, of=str)
    if types is None:
        attends = config.list("full_attn_idxs", list(range(layers)), of=int)
        return [ATTENDS if i in attends else CONV for i in range(layers)]
    if len(types) != layers or not set(types) <= {CONV, ATTENDS}:
        raise config.wrong("layer_types", f"{layers} of {CONV}, {ATTENDS}")
    return list(types)


def _inner(config: ConfigReader, inner: int) -> int:
    """Two thirds of what is stated, times a factor, as a multiple of `block_multiple_of`."""
    if not config.bool("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    factor = config.float("block_ffn_dim_multiplier", 1.0, ge=0.0)
    multiple = config.int("block_multiple_of", 256, ge=1)
    return -(-int(factor * inner) // multiple) * multiple

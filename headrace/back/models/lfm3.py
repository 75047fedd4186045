"""LFM3: LFM2's short convolutions and attention, with windows in some layers, a gate for each head
and norms around both branches."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.short_conv import GatedConvSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.hybrid import MAX_TAPS
from headrace.back.models.lfm2 import CONV, MLP, NAMES, PLACEMENT
from headrace.base.config.hf import ConfigReader

FULL, WINDOW = "full_attention", "sliding_attention"
SANDWICH = replace(PLACEMENT, after_attention="post_operator_norm", after_mlp="post_ffn_norm")
THETAS = {FULL: 1_000_000.0, WINDOW: 10_000.0}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Lfm3ForCausalLM."""
    tied = config.bool("tie_embedding", True)
    sizes = read_sizes(config, eps=1e-5, tied=tied)
    placement = SANDWICH if config.bool("use_sandwich_norm", True) else PLACEMENT
    conv = GatedConvSpec(
        width=sizes.width,
        taps=config.int("conv_L_cache", 7, ge=2, le=MAX_TAPS),
        bias=config.bool("conv_bias", False),
    )
    kinds: dict[str, MixerSpec] = {
        FULL: _attention(scope, config, sizes, FULL, window=None),
        WINDOW: _attention(
            scope, config, sizes, WINDOW, window=config.int("sliding_window", 256, ge=1)
        ),
        CONV: conv,
    }
    layers = tuple(
        LayerSpec(mixer=kinds[kind], placement=placement, feed_forward=MLP)
        for kind in _kinds(config, sizes.layers)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES))


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, kind: str, *, window: int | None
) -> AttentionSpec:
    bias = config.bool("attention_bias", False)
    return AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            layer_type=kind,
            default_theta=THETAS[kind],
        ),
        window=window,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(eps=sizes.eps),
        gate=OutputGate(name="gate_proj", per_head=True)
        if config.bool("use_attention_gate", True)
        else None,
    )


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    """By `layer_types`, else two convolutions between attentions of both kinds in turn."""
    types = config.list("layer_types", None, of=str)
    if types is None:
        turn = (WINDOW, CONV, FULL, CONV)
        return [CONV if i == 0 else turn[i % 4] for i in range(layers)]
    if len(types) != layers or not set(types) <= {CONV, FULL, WINDOW}:
        raise config.wrong("layer_types", f"{layers} of {CONV}, {FULL}, {WINDOW}")
    return list(types)

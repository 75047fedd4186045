"""Jet-Nemotron (Gu et al. 2025): Qwen 2's layers, in most of which the gated delta rule stands in
place of attention, with a convolution of values alone whose taps follow from the token."""

from __future__ import annotations

import math

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames, GatedDeltaSpec
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.layers.ssm.token_taps import TokenTapsSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.hybrid import MAX_TAPS
from headrace.base.config.hf import ConfigReader

KINDS = ("linear_attention", "sliding_attention", "full_attention")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """JetNemotronForCausalLM, its keys in common ones (recurrent_keys.py)."""
    sizes = read_sizes(config)
    kinds = config.list("layer_types", of=str, length=sizes.layers)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)

    def mixer(kind: str) -> MixerSpec:
        if kind == KINDS[0]:
            return _delta(config, sizes)
        window = config.int("sliding_window", ge=1) if kind == KINDS[1] else None
        return AttentionSpec(**plain_attention(sizes), rope=rope, window=window, qkv_bias=True)

    mixers = {kind: mixer(kind) for kind in set(kinds)}
    layers = tuple(LayerSpec(mixer=mixers[kind]) for kind in kinds)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    own = config.required_section("efficient_attention_config").required_section("jet")
    heads, key_dim = own.int("num_heads", 6, ge=1), own.int("head_dim", 256, ge=1)
    expand = own.float("expand_v", 2.0, ge=0.0)
    value_dim = int(key_dim * expand)
    if value_dim < 1 or not math.isclose(key_dim * expand, value_dim, rel_tol=1e-5):
        raise own.wrong("expand_v", f"a whole number of values, times head_dim ({key_dim})")
    rank = heads * value_dim // own.int("dconv_generator_reduction", 8, ge=1)
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=heads,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=own.int("conv_size", 4, ge=2, le=MAX_TAPS),
        norm=GatedNormSpec(
            eps=_eps(own), groups=heads, norm_first=True, shared=True, name="o_norm"
        ),
        names=DeltaNames(module="self_attn"),
        token_taps=TokenTapsSpec(rank=rank),
    )


def _eps(own: ConfigReader) -> float:
    """Published as a string."""
    stated = own.raw.get("norm_eps", 1e-5)
    try:
        eps = float(stated)
    except (TypeError, ValueError):
        eps = math.nan
    if not 0.0 <= eps < 1.0:
        raise own.wrong("norm_eps", "a number from 0 to 1")
    return eps

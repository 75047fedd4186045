"""Ling 3 (Bailing hybrid): Kimi delta attention whose gates are bounded below, and in each group's
last layer latent attention with a gate for each head; dense layers, then experts."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.latent_attention import LatentNames
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames, GatedDeltaSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    read_sizes,
)
from headrace.back.models.hybrid import MAX_TAPS, linear_layers
from headrace.back.models.kimi_linear import delta_norm
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.moe import (
    draft_layers,
    feed_forwards,
    sigmoid_mixture,
    sparse_by_type,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(embedding="word_embeddings")
DELTA = DeltaNames(
    module="attention",
    parts=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"),
    out="dense",
)
LATENT = LatentNames(module="attention", out="dense")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BailingHybridForCausalLM."""
    sizes = read_sizes(config)
    latent = replace(
        read_latent_attention(scope, config, sizes, layout="pairs"),
        gate=OutputGate(name="g_proj", per_head=True),
        names=LATENT,
    )
    delta = _delta(config, sizes)
    every = config.int("layer_group_size", 6, ge=1)
    kinds = linear_layers(config, sizes.layers, default=lambda i: (i + 1) % every != 0)
    mixture = sigmoid_mixture(config, bias_name="gate.expert_bias")
    sparse = sparse_by_type(config, sizes.layers, dense=2)
    layers = tuple(
        LayerSpec(mixer=delta if is_linear else latent, feed_forward=feed_forward)
        for is_linear, feed_forward in zip(kinds, feed_forwards(mixture, sparse), strict=True)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES, ignored=ignored))


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    head_dim = config.int("linear_head_dim", None, ge=1) or config.int("head_dim", 128, ge=1)
    bounded = config.bool("kda_safe_gate", True)
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=sizes.heads,
        heads=sizes.heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=config.int("short_conv_kernel_size", 4, ge=2, le=MAX_TAPS),
        norm=delta_norm(sizes.heads, sizes.eps),
        names=DELTA,
        per_channel=True,
        bound=config.float("kda_lower_bound", -5.0, le=0.0) if bounded else 0.0,
    )

"""Nemotron-H: layers of one branch each: Mamba 2, attention without positions, or an MLP."""

from __future__ import annotations

import math

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.layers.ssm.mamba2 import Mamba2Spec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.ssm import BACKBONE, HYBRID_KINDS, ONE_BRANCH, divides, read_layer_kinds
from headrace.base.config.hf import ConfigReader

KINDS = {**HYBRID_KINDS, "mlp": "mlp"}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp"}
"""Of `hybrid_override_pattern`, as the models' first configs have it."""
ATTENTION_NAMES = AttentionNames(module="mixer")
MLP_PLACEMENT = NormPlacement(before_mlp="norm")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """NemotronHForCausalLM."""
    sizes = read_sizes(
        config, activation=("mlp_hidden_act",), default_activation="relu2", gated=False, eps=1e-5
    )
    attention = AttentionSpec(**plain_attention(sizes), rope=None, names=ATTENTION_NAMES)
    mlp = PlainMLPSpec(name="mixer", bias=config.bool("mlp_bias", False))
    layers = {
        "mamba": LayerSpec(
            attention=_mamba(config, sizes), placement=ONE_BRANCH, feed_forward=None
        ),
        "attention": LayerSpec(attention=attention, placement=ONE_BRANCH, feed_forward=None),
        "mlp": LayerSpec(attention=None, placement=MLP_PLACEMENT, feed_forward=mlp),
    }
    kinds = _kinds(config, sizes.layers)
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=tuple(layers[kind] for kind in kinds), names=BACKBONE),
    )


def _mamba(config: ConfigReader, sizes: DecoderSizes) -> Mamba2Spec:
    heads = config.int("mamba_num_heads", 128, ge=1)
    groups = divides(config, "n_groups", config.int("n_groups", 8, ge=1), heads)
    config.choice("mamba_hidden_act", ("silu", "swish"), "silu")
    bias = config.bool("use_bias", False)
    return Mamba2Spec(
        width=sizes.width,
        heads=heads,
        head_dim=config.int("mamba_head_dim", 64, ge=1),
        state_dim=config.int("ssm_state_size", 128, ge=1),
        groups=groups,
        taps=config.int("conv_kernel", 4, ge=2, le=8),
        limits=(config.float("time_step_min", 0.001, ge=0.0), math.inf),
        bias=bias,
        conv_bias=config.bool("use_conv_bias", True),
        norm=GatedNormSpec(eps=sizes.eps, groups=groups),
    )


def _kinds(config: ConfigReader, layers: int) -> tuple[str, ...]:
    pattern = config.str("hybrid_override_pattern", None)
    if pattern is None:
        return read_layer_kinds(config, layers, KINDS)
    if len(pattern) != layers or not set(pattern) <= set(LETTERS):
        raise config.wrong("hybrid_override_pattern", f"{layers} of the letters {''.join(LETTERS)}")
    return tuple(LETTERS[letter] for letter in pattern)

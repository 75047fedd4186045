"""Nemotron-H and Nemotron 3: layers of one branch each: Mamba 2, attention without positions, an
MLP, or experts, whose sizes may be each layer's own (Puzzle).

Their MLPs have no gate: down(relu(up)^2), which is down(relu(gate) * up) where gate and up are the
same. So the experts' kernels serve them, with each up in memory twice.
"""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import FeedForwardSpec, PlainMLPSpec, SummedSpec
from headrace.back.layers.moe.latent import LatentMixtureSpec
from headrace.back.layers.moe.weights import SeparateExperts
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
from headrace.back.models.moe import sigmoid_mixture
from headrace.back.models.ssm import BACKBONE, HYBRID_KINDS, ONE_BRANCH, divides, read_layer_kinds
from headrace.base.config.hf import ConfigReader

KINDS = {**HYBRID_KINDS, "mlp": "mlp", "moe": "moe"}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Of `hybrid_override_pattern`, as the models' first configs have it."""
ATTENTION_NAMES = AttentionNames(module="mixer")
MLP_PLACEMENT = NormPlacement(before_mlp="norm")
UNGATED = SeparateExperts(gate="experts.{}.up_proj.weight")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """NemotronHForCausalLM, NemotronHPuzzleForCausalLM."""
    sizes = read_sizes(
        config, activation=("mlp_hidden_act",), default_activation="relu2", gated=False, eps=1e-5
    )
    attention = AttentionSpec(**plain_attention(sizes), rope=None, names=ATTENTION_NAMES)
    mlp = PlainMLPSpec(name="mixer", bias=config.bool("mlp_bias", False))
    layers = {
        "mamba": LayerSpec(mixer=_mamba(config, sizes), placement=ONE_BRANCH, feed_forward=None),
        "attention": LayerSpec(mixer=attention, placement=ONE_BRANCH, feed_forward=None),
        "mlp": LayerSpec(mixer=None, placement=MLP_PLACEMENT, feed_forward=mlp),
    }

    def experts(layer: int) -> LayerSpec:
        branch = _experts(_of_layer(config, layer), sizes)
        return LayerSpec(mixer=None, placement=MLP_PLACEMENT, feed_forward=branch)

    kinds = _kinds(config, sizes.layers)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=tuple(
                experts(i) if kind == "moe" else layers[kind] for i, kind in enumerate(kinds)
            ),
            names=BACKBONE,
            ignored=(r"mtp\..*",),
        ),
    )


def _of_layer(config: ConfigReader, layer: int) -> ConfigReader:
    """The config as this layer with experts reads it: with what it has of its own, if the config
    lists such (Nemotron 3 Puzzle)."""
    blocks = config.raw.get("block_configs")
    if not isinstance(blocks, list):
        return config
    where = f"{config.where}: block_configs: {layer}"
    return ConfigReader({**config.raw, **blocks[layer]}, where)


def _experts(config: ConfigReader, sizes: DecoderSizes) -> FeedForwardSpec:
    if sizes.activation != "relu2":
        raise config.wrong("mlp_hidden_act", "relu2, as experts without a gate have it")
    mixture = replace(
        sigmoid_mixture(config), layout=UNGATED, shared=None, name="mixer", activation="relu"
    )
    shared = config.int("moe_shared_expert_intermediate_size", ge=1)
    bias, latent = config.bool("mlp_bias", False), config.int("moe_latent_size", None, ge=1)
    beside = PlainMLPSpec(name="mixer.shared_experts", inner=shared, bias=bias)
    if latent is None:
        return SummedSpec(experts=mixture, beside=beside)
    over = LatentMixtureSpec(mixture=mixture, latent=latent, bias=bias)
    return SummedSpec(experts=over, beside=beside)


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

"""Jamba: Mamba with norms inside and attention without positions in turn, experts in every other
layer."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.norm import RMS, NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.ssm import read_mamba1
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(before_attention="input_layernorm", before_mlp="pre_ff_layernorm")
NAMES = DecoderNames(norm="final_layernorm")
KEYS = ("mamba_expand", "mamba_d_state", "mamba_dt_rank")
MLP = GatedMLPSpec(name="feed_forward")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """JambaForCausalLM."""
    sizes = read_sizes(config)
    mamba = read_mamba1(config, sizes.width, keys=KEYS)
    mamba = replace(mamba, norm=RMS, eps=sizes.eps, name="mamba")
    attention = AttentionSpec(**plain_attention(sizes), rope=None)
    experts = config.int("num_experts", 16, ge=1)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 2, ge=1, le=experts),
            name="router",
        ),
        inner=sizes.inner,
        name="feed_forward",
    )
    attends = _periodic(config, "attn", sizes.layers, period=8, offset=4)
    is_sparse = _periodic(config, "expert", sizes.layers, period=2, offset=1)
    layers = tuple(
        LayerSpec(
            mixer=attention if attends[i] else mamba,
            placement=PLACEMENT,
            feed_forward=mixture if is_sparse[i] and experts > 1 else MLP,
        )
        for i in range(sizes.layers)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES))


def _periodic(
    config: ConfigReader, name: str, layers: int, *, period: int, offset: int
) -> list[bool]:
    """The layers at one offset within each period, which both have defaults."""
    period = config.int(f"{name}_layer_period", period, ge=1)
    offset = config.int(f"{name}_layer_offset", offset, ge=0, le=period - 1)
    return [layer % period == offset for layer in range(layers)]

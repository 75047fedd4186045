"""RecurrentGemma (Griffin, De et al. 2024): two recurrent layers to one of attention in a window,
of which half of each head is rotated; biased MLPs, soft-capped logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET, NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.rg_lru import RgLruSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
)
from headrace.back.models.gemma2 import embedding_scale, gemma_sizes, soft_cap
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(norm="final_norm")
ATTENTION = AttentionNames(module="temporal_block")
PLACEMENT = NormPlacement(before_attention="temporal_pre_norm", before_mlp="channel_pre_norm")
MLP = GatedMLPSpec(name="mlp_block", bias=True)
RECURRENT, ATTENDING = "recurrent", "attention"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """RecurrentGemmaForCausalLM."""
    sizes = gemma_sizes(config)
    if sizes.inner % 2:
        raise config.wrong("intermediate_size", "an even number: half of it is the MLPs' width")
    sizes = replace(sizes, inner=sizes.inner // 2)
    recurrent, attention = _recurrent(config, sizes), _attention(scope, config, sizes)
    layers = tuple(
        LayerSpec(
            mixer=recurrent if kind == RECURRENT else attention,
            placement=PLACEMENT,
            feed_forward=MLP,
        )
        for kind in _kinds(config, sizes.layers)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            names=NAMES,
            norm=RMS_UNIT_OFFSET,
            embedding_scale=embedding_scale(sizes.width, torch.bfloat16),
            logits_softcap=soft_cap(config, "logits_soft_cap", 30.0),
        ),
    )


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    """Of each layer: the list in the config is repeated."""
    kinds = config.list("block_types", [RECURRENT, RECURRENT, ATTENDING], of=str)
    if not kinds or not set(kinds) <= {RECURRENT, ATTENDING}:
        raise config.wrong("block_types", f"a list of {RECURRENT}, {ATTENDING}")
    return [kinds[layer % len(kinds)] for layer in range(layers)]


def _recurrent(config: ConfigReader, sizes: DecoderSizes) -> RgLruSpec:
    channels = config.int("lru_width", None, ge=1) or sizes.width
    if channels % sizes.heads:
        raise config.wrong("lru_width", f"a multiple of num_attention_heads ({sizes.heads})")
    return RgLruSpec(
        width=sizes.width,
        channels=channels,
        blocks=sizes.heads,
        taps=config.int("conv1d_width", 4, ge=2, le=8),
        activation=sizes.activation,
    )


def _attention(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> AttentionSpec:
    return AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            default_share=0.5,
        ),
        window=config.int("attention_window_size", 2048, ge=1),
        qkv_bias=config.bool("attention_bias", False),
        out_bias=True,
        names=ATTENTION,
    )

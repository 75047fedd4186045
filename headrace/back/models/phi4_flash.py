"""Phi-4-mini-flash (SambaY; Ren et al. 2025): Mamba and differential attention in windows in turn;
above the middle one attention over all, whose cache the layers above share, and gates over the scan
before it (names and keys of the published checkpoint)."""

from __future__ import annotations

import math

from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.paired_attention import PairedAttentionSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.mamba1 import Mamba1Spec
from headrace.back.layers.ssm.scan_memory import MemoryGateSpec, RememberedMamba1Spec, ScanMemory
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    read_sizes,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(norm="final_layernorm")
MLP = GatedMLPSpec(merged="fc1", down="fc2")
PAIR_EPS = 1e-5
"""Of the norms behind pairs of heads: not the model's own."""
CACHES_OF_MAMBA = 2


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Phi4FlashForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    if config.int("mb_per_layer", 2, ge=0) != 2:
        raise config.wrong("mb_per_layer", "2: every second layer has a scan")
    if sizes.layers % 4:
        raise config.wrong("num_hidden_layers", "a multiple of 4")
    if sizes.kv_heads % 2:
        raise config.wrong("num_key_value_heads", "an even number: heads are taken in pairs")
    for key in ("mlp_bias", "lm_head_bias"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    layers = tuple(LayerSpec(mixer=mixer, feed_forward=MLP) for mixer in _mixers(config, sizes))
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, norm=LAYER, names=NAMES))


def _mixers(config: ConfigReader, sizes: DecoderSizes) -> list[MixerSpec]:
    mamba, memory = _mamba(config, sizes), ScanMemory()
    middle, window = sizes.layers // 2, config.int("sliding_window", 512, ge=1)
    shared = (CACHES_OF_MAMBA + 1) * (middle // 2) + CACHES_OF_MAMBA

    def attention(layer: int) -> PairedAttentionSpec:
        return PairedAttentionSpec(
            width=sizes.width,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            first=0.8 - 0.6 * math.exp(-0.3 * layer),
            eps=PAIR_EPS,
            window=window if layer < middle else None,
            source=shared if layer > middle + 1 else None,
            memory=memory if layer == middle + 1 else None,
        )

    def scan(layer: int) -> MixerSpec:
        if layer < middle:
            return mamba
        if layer == middle:
            return RememberedMamba1Spec(mamba=mamba, memory=memory)
        return MemoryGateSpec(
            width=sizes.width, inner=mamba.inner, memory=memory, bias=mamba.bias, name="attn"
        )

    return [attention(layer) if layer % 2 else scan(layer) for layer in range(sizes.layers)]


def _mamba(config: ConfigReader, sizes: DecoderSizes) -> Mamba1Spec:
    automatic = config.raw.get("mamba_dt_rank", "auto") == "auto"
    return Mamba1Spec(
        width=sizes.width,
        inner=config.int("mamba_expand", 2, ge=1) * sizes.width,
        state_dim=config.int("mamba_d_state", 16, ge=1),
        step_rank=-(-sizes.width // 16) if automatic else config.int("mamba_dt_rank", ge=1),
        taps=config.int("mamba_d_conv", 4, ge=2, le=8),
        bias=config.bool("mamba_proj_bias", False),
        conv_bias=config.bool("mamba_conv_bias", True),
        name="attn",
    )

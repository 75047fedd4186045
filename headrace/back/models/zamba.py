"""Zamba 1 (Glorioso et al. 2024): Mamba in heads in all layers, and before some of them one
transformer block that these share; it reads the token's embedding too."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.layers.shared_block import SharedBlock, SharedBlockSpec
from headrace.back.layers.ssm.mamba_heads import MambaHeadsSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, read_sizes
from headrace.back.models.ssm import read_layer_kinds
from headrace.back.models.zamba2 import (
    HYBRID,
    KINDS,
    MAMBA,
    NAMES,
    KeptEmbeddingSpec,
    ZambaLayerSpec,
    shared_block,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ZambaForCausalLM."""
    sizes = read_sizes(config, default_activation="gelu", eps=1e-5, tied=True)
    mamba, kinds = _mamba(config, sizes), _kinds(config, sizes.layers)
    hybrids = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
    inside = scope if scope.head.bare else scope / NAMES.prefix
    blocks = [
        SharedBlock(inside / NAMES.layers / str(layer) / "shared_transf", _block(config, sizes))
        for layer in hybrids[:1]
    ]
    layers = tuple(
        ZambaLayerSpec(mamba=mamba, block=blocks[0] if kind == HYBRID else None) for kind in kinds
    )
    others = "|".join(map(str, hybrids[1:])) or "none"
    ignored = (rf".*layers\.({others})\.shared_transf\..*",)
    streams = KeptEmbeddingSpec()
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=layers, names=NAMES, streams=streams, ignored=ignored),
    )


def _kinds(config: ConfigReader, layers: int) -> tuple[str, ...]:
    """As listed, or the third layer and then one in each period behind it."""
    if "layers_block_type" in config or "layer_types" in config:
        return read_layer_kinds(config, layers, KINDS)
    period = config.int("attn_layer_period", 6, ge=1)
    offset = config.int("attn_layer_offset", 4, ge=0, le=period - 1)
    return tuple(
        HYBRID if layer == 2 or (layer > 2 and (layer - 3) % period == offset) else MAMBA
        for layer in range(layers)
    )


def _block(config: ConfigReader, sizes: DecoderSizes) -> SharedBlockSpec:
    width = config.int("attention_hidden_size", None, ge=1) or 2 * sizes.width
    if width != 2 * sizes.width:
        raise config.wrong("attention_hidden_size", f"2 * hidden_size ({2 * sizes.width})")
    head_dim = config.int("attention_head_dim", None, ge=1) or width // sizes.heads
    return shared_block(sizes, head_dim=head_dim)


def _mamba(config: ConfigReader, sizes: DecoderSizes) -> MambaHeadsSpec:
    config.choice("hidden_mamba_act", ("silu", "swish"), "silu")
    inner = config.int("mamba_expand", 2, ge=1) * sizes.width
    heads = config.int("n_mamba_heads", 2, ge=1)
    if inner % heads:
        raise config.wrong("n_mamba_heads", f"a divisor of Mamba's inner size ({inner})")
    automatic = config.raw.get("mamba_dt_rank", "auto") == "auto"
    return MambaHeadsSpec(
        width=sizes.width,
        heads=heads,
        head_dim=inner // heads,
        state_dim=config.int("mamba_d_state", 16, ge=1),
        step_rank=-(-sizes.width // 16) if automatic else config.int("mamba_dt_rank", ge=1),
        taps=config.int("mamba_d_conv", 4, ge=2, le=8),
        name="mamba",
        bias=config.bool("mamba_proj_bias", False),
        conv_bias=config.bool("mamba_conv_bias", True),
    )

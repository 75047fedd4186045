"""Granite with sliding windows: attention sinks in all layers, a window in three of four, and rope
of a base frequency of the layer's own, or none."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSizes, read_sizes, read_windows
from headrace.back.models.granite import granite_attention, granite_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteSWAForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    mlp = GatedMLPSpec(bias=config.bool("mlp_bias", False))
    return granite_decoder(scope, config, sizes, swa_mixers(scope, config, sizes), mlp)


def swa_mixers(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> list[AttentionSpec]:
    """The attention of each layer."""
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 128, ge=1),
        sliding=lambda layer: layer % 4 != 0,
    )
    attention = replace(granite_attention(scope, config, sizes), sinks=True)
    assert attention.rope is not None
    ropes: list[RopeSpec | None] = [attention.rope] * sizes.layers
    thetas = config.list("layer_rope_theta", None, of=float, length=sizes.layers)
    if thetas is not None:
        ropes = [_rope(scope, config, sizes, theta) if theta else None for theta in thetas]
    return [
        replace(attention, window=window, rope=rope)
        for window, rope in zip(windows, ropes, strict=True)
    ]


def _rope(scope: Scope, config: ConfigReader, sizes: DecoderSizes, theta: float) -> RopeSpec:
    """The config's rope with another base frequency."""
    stated = config.raw.get("rope_parameters")
    parameters = {**(stated if isinstance(stated, dict) else {}), "rope_theta": theta}
    own = ConfigReader({**config.raw, "rope_parameters": parameters}, config.where)
    return read_rope(own, head_dim=sizes.head_dim, max_positions=scope.max_positions)

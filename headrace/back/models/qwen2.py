"""Qwen 2 and 2.5: Llama's decoder with biases on query, key and value, and windows in the upper
layers if switched on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen2ForCausalLM."""
    sizes = read_sizes(config)
    return qwen2_decoder(scope, config, sizes, [GATED_MLP] * sizes.layers)


def qwen2_decoder(
    scope: Scope,
    config: ConfigReader,
    sizes: DecoderSizes,
    feed_forwards: Sequence[FeedForwardSpec],
    *,
    bias: bool = True,
    **more: Any,
) -> Decoder:
    """The decoder with a feed-forward for each layer. `bias`: of query, key and value; `more`: as
    DecoderSpec has it."""
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(**plain_attention(sizes), rope=rope, window=window, qkv_bias=bias),
            feed_forward=feed_forward,
        )
        for window, feed_forward in zip(
            qwen_windows(config, sizes.layers), feed_forwards, strict=True
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, **more))


def qwen_windows(config: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Windows count only with use_sliding_window, from layer max_window_layers on; without, the
    window may be 0."""
    used = config.bool("use_sliding_window", False)
    window = config.int("sliding_window", None, ge=1 if used else 0)
    lowest = config.int("max_window_layers", 28, ge=0)
    return read_windows(
        config, layers, window=window if used else None, sliding=lambda layer: layer >= lowest
    )

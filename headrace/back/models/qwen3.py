"""Qwen 3: Llama's decoder with a norm over each query and key head."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.qwen2 import qwen_windows
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3ForCausalLM."""
    sizes = read_sizes(config)
    return qwen3_decoder(scope, config, sizes, [GATED_MLP] * sizes.layers)


def qwen3_decoder(
    scope: Scope,
    config: ConfigReader,
    sizes: DecoderSizes,
    feed_forwards: Sequence[FeedForwardSpec],
    *,
    default_theta: float = 10_000.0,
    ignored: tuple[str, ...] = (),
    rope: RopeSpec | None = None,
) -> Decoder:
    """The decoder with a feed-forward for each layer. `rope`: None: as the config says."""
    bias = config.bool("attention_bias", False)
    rope = rope or read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=default_theta,
    )
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(eps=sizes.eps),
            ),
            feed_forward=feed_forward,
        )
        for window, feed_forward in zip(
            qwen_windows(config, sizes.layers), feed_forwards, strict=True
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))

"""Mellum 2 (JetBrains): Qwen 3 with experts, whose layers with windows have a rotation of their
own."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.back.models.moe import feed_forwards, sparse_by_type
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.base.config.hf import ConfigReader

THETAS = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}
DRAFTS = (r"mtp\..*",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MellumForCausalLM."""
    sizes = read_sizes(config)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 1024, ge=1),
        sliding=lambda layer: False,
    )
    bias = config.bool("attention_bias", False)
    ropes = {
        kind: read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            layer_type=kind,
            default_theta=theta,
        )
        for kind, theta in THETAS.items()
    }
    mixture = qwen_mixture(config, renormalize=True)
    sparse = sparse_by_type(config, sizes.layers)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=ropes["sliding_attention" if window else "full_attention"],
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(eps=sizes.eps),
            ),
            feed_forward=feed_forward,
        )
        for window, feed_forward in zip(windows, feed_forwards(mixture, sparse), strict=True)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=DRAFTS))

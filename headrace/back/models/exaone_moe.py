"""EXAONE with experts (K-EXAONE): EXAONE 4's attention between norms before both branches, dense
layers first, then experts routed as DeepSeek-V3 routes them."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    GATED_MLP,
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.exaone4 import exaone_windows
from headrace.back.models.moe import sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ExaoneMoeForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    mixture = sigmoid_mixture(config)
    windows = exaone_windows(config, sizes.layers)
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                **plain_attention(sizes),
                rope=rope if window or not any(windows) else None,
                window=window,
                qk_norm=QKNorm(eps=sizes.eps),
            ),
            feed_forward=mixture if sparse else GATED_MLP,
        )
        for window, sparse in zip(
            windows, sparse_by_type(config, sizes.layers, first=1), strict=True
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=(r"mtp\..*",)))

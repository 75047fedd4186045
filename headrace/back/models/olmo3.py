"""OLMo 3: OLMo 2's norms, three local layers (sliding window) to one global, whose rope alone is
scaled."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import POST
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
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Olmo3ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 4096, ge=1),
        sliding=lambda layer: (layer + 1) % 4 != 0,
    )
    bias = config.bool("attention_bias", False)
    theta = config.float("rope_theta", 500_000.0, ge=1.0)
    places = {"head_dim": sizes.head_dim, "max_positions": scope.max_positions}
    local = read_rope(config, **places, layer_type="sliding_attention", theta=theta)
    whole = read_rope(config, **places, layer_type="full_attention", default_theta=theta)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=local if window else whole,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(over="width", eps=sizes.eps),
            ),
            placement=POST,
        )
        for window in windows
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))

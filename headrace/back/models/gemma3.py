"""Gemma 3, text: Gemma 2's norms, a norm over each query and key head, five local layers (sliding
window, own rope) to one global. Checkpoints with a vision tower keep the text model under
text_config and another prefix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import RMS_UNIT_OFFSET, SANDWICH
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_windows,
)
from headrace.back.models.gemma2 import embedding_scale, gemma_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma3ForCausalLM."""
    sizes = gemma_sizes(config)
    windows = gemma3_windows(config, sizes.layers)
    attention = gemma3_attention(config, sizes)
    local, whole = local_and_global_ropes(scope, config, sizes.head_dim)
    mixers = (
        AttentionSpec(**attention, window=window, rope=local if window else whole)
        for window in windows
    )
    return gemma3_decoder(scope, config, sizes, mixers)


def gemma3_attention(config: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """What attention of all layers shares."""
    if config.bool("use_bidirectional_attention", False):
        raise config.wrong("use_bidirectional_attention", "false for generation")
    bias = config.bool("attention_bias", False)
    return {
        **plain_attention(sizes),
        "scale": config.float("query_pre_attn_scalar", 256.0, ge=1e-6) ** -0.5,
        "softcap": config.float("attn_logit_softcapping", None, ge=1e-6),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
    }


def gemma3_decoder(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, mixers: Iterable[AttentionSpec]
) -> Decoder:
    """Layers with this attention."""
    layers = tuple(LayerSpec(mixer=mixer, placement=SANDWICH) for mixer in mixers)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            embedding_scale=embedding_scale(sizes.width, scope.dtype),
            logits_softcap=config.float("final_logit_softcapping", None, ge=1e-6),
        ),
    )


def gemma3_windows(config: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Each layer's `sliding_window`, None for global ones."""
    pattern = config.int("sliding_window_pattern", 6, aliases=("_sliding_window_pattern",), ge=1)
    return read_windows(
        config,
        layers,
        window=config.int("sliding_window", 4096, ge=1),
        sliding=lambda layer: (layer + 1) % pattern != 0,
    )


def local_and_global_ropes(
    scope: Scope, config: ConfigReader, head_dim: int
) -> tuple[RopeSpec, RopeSpec]:
    """Local layers: base 10000, never scaled in the old spelling. Global ones: base 1e6, scaled."""
    sizes = {"head_dim": head_dim, "max_positions": scope.max_positions}
    local = read_rope(
        config,
        **sizes,
        layer_type="sliding_attention",
        theta=config.float("rope_local_base_freq", 10_000.0, ge=1.0),
    )
    whole = read_rope(config, **sizes, layer_type="full_attention", default_theta=1e6)
    return local, whole

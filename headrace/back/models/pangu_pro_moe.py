"""openPangu-Pro-MoE V2: attention with learned keys in front of every text, keys normed, heads
rotated in part and values smaller than keys; experts as DeepSeek-V3's (Huawei 2025)."""

from __future__ import annotations

from headrace.back.layers.prefixed_attention import PrefixedAttentionSpec
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
from headrace.back.models.moe import dense_first, draft_layers, feed_forwards
from headrace.back.models.pangu_ultra_moe import pangu_mixture, pangu_placement, refuse_others
from headrace.base.config.hf import ConfigReader

OTHERS = ("kv_lora_rank", "param_sink_scalar", "param_sink_of_head_num", "block_post_layernorm_idx")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PanguProMoEV2ForCausalLM, its keys in common ones (expert_keys.py)."""
    refuse_others(config, OTHERS)
    sizes = read_sizes(config, eps=1e-5)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    placement = pangu_placement(config)
    branches = feed_forwards(pangu_mixture(config), dense_first(config, sizes.layers))
    layers = tuple(
        LayerSpec(
            mixer=_attention(config, sizes, rope, window),
            placement=placement,
            feed_forward=feed_forward,
        )
        for window, feed_forward in zip(_windows(config, sizes.layers), branches, strict=True)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))


def _attention(
    config: ConfigReader, sizes: DecoderSizes, rope: RopeSpec, window: int | None
) -> PrefixedAttentionSpec:
    bias = config.bool("attention_bias", False, aliases=("bias",))
    return PrefixedAttentionSpec(
        **plain_attention(sizes),
        rope=rope,
        window=window,
        qkv_bias=config.bool("qkv_bias", bias),
        out_bias=bias,
        value_dim=config.int("v_channels", sizes.head_dim, ge=1, le=sizes.head_dim),
        learned=config.int("param_sink_number", ge=1),
        learned_values=config.bool("param_sink_with_value", False),
        key_eps=sizes.eps,
    )


def _windows(config: ConfigReader, layers: int) -> list[int | None]:
    """Of each layer: a list in the config is repeated."""
    stated = config.raw.get("interleaved_sliding_window")
    sizes = stated if isinstance(stated, list) and stated else [stated]
    if not all(one is None or (type(one) is int and one > 0) for one in sizes):
        raise config.wrong("interleaved_sliding_window", "a positive number, or a list of them")
    return [sizes[layer % len(sizes)] for layer in range(layers)]

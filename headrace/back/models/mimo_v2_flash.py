"""MiMo-V2-Flash and V2.5: windows with attention sinks and twice the KV heads in most layers,
values smaller than keys, a third of each head rotated, experts routed as DeepSeek-V3's are."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.linear import MergedTensor
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
from headrace.back.models.moe import feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader

PARTS = (r"model\.mtp\..*", r"(visual|audio_encoder|speech_embeddings)\..*")
"""What drafts, sees and hears is not read."""
SHARE = 0.334
THETAS = {"full_attention": 5_000_000.0, "sliding_attention": 10_000.0}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiMoV2FlashForCausalLM, MiMoV2ForCausalLM; MiMoV2OmniForCausalLM, its text part."""
    sizes = read_sizes(config, eps=1e-5)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 129, ge=1),
        sliding=lambda layer: layer != 0 and (layer + 1) % 6 != 0,
    )
    mixture = replace(sigmoid_mixture(config), shared=None)
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    layers = tuple(
        LayerSpec(mixer=_attention(scope, config, sizes, window), feed_forward=feed_forward)
        for window, feed_forward in zip(windows, feed_forwards(mixture, sparse), strict=True)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=PARTS))


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, window: int | None
) -> AttentionSpec:
    kind = "sliding_attention" if window else "full_attention"
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        layer_type=kind,
        default_theta=THETAS[kind],
        default_share=SHARE,
    )
    kv_heads = sizes.kv_heads
    if window:
        kv_heads = config.int("swa_num_key_value_heads", 2 * kv_heads, ge=1)
        if sizes.heads % kv_heads:
            raise config.wrong("swa_num_key_value_heads", f"a divisor of {sizes.heads}")
    return AttentionSpec(
        **{**plain_attention(sizes), "kv_heads": kv_heads},
        rope=rope,
        window=window,
        qkv_bias=config.bool("attention_bias", False),
        sinks=window is not None,
        names=AttentionNames(sinks="attention_sink_bias", grouped=_merged(config, sizes, kv_heads)),
        value_dim=config.int("v_head_dim", sizes.head_dim, ge=1, le=sizes.head_dim),
        value_scale=config.float("attention_value_scale", 1.0),
    )


def _merged(config: ConfigReader, sizes: DecoderSizes, kv_heads: int) -> MergedTensor | None:
    """The tensor of queries, keys and values in as many groups as layers without windows have KV
    heads (expert_keys.py)."""
    if config.choice("attention_projection_layout", ("split", "fused_qkv"), "split") == "split":
        return None
    if kv_heads % sizes.kv_heads:
        raise config.wrong("swa_num_key_value_heads", f"a multiple of {sizes.kv_heads}")
    return MergedTensor(name="qkv_proj", parts=(0, 1, 2), groups=sizes.kv_heads)

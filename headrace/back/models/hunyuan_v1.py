"""Hunyuan v1, dense: Llama's decoder with a norm over each query and key head behind the
rotation."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HunYuanDenseV1ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    layer = LayerSpec(mixer=hunyuan_attention(scope, config, sizes))
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))


def hunyuan_attention(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> AttentionSpec:
    """The attention of every layer."""
    if not config.bool("use_qk_norm", True):
        raise config.wrong("use_qk_norm", "true")
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    names = ("query_layernorm", "key_layernorm")
    return AttentionSpec(
        **plain_attention(sizes),
        rope=replace(rope, halves=bool(axis_sections(config))),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(eps=sizes.eps, names=names, after_rope=True),
    )


def axis_sections(config: ConfigReader) -> tuple[int, ...]:
    """Pairs of dimensions that each axis of positions turns; empty: there is one axis."""
    values = config.section("rope_parameters") or config.section("rope_scaling") or config
    return values.list("mrope_section", (), of=int, aliases=("xdrope_section",))

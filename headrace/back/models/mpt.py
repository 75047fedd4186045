"""MPT: layer norms without bias, ALiBi, query, key and value in one tensor, clipped or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.back.layers.alibi import LARGEST, alibi_slopes
from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER_NO_BIAS, NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="transformer", embedding="wte", layers="blocks", norm="norm_f")
ATTENTION = AttentionNames(module="attn", merged="Wqkv", out="out_proj")
PLACEMENT = NormPlacement(before_attention="norm_1", before_mlp="norm_2")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MptForCausalLM. `no_bias` is true in all published ones, `logit_scale` absent."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config,
        activation=("activation",),
        gated=False,
        default_activation="gelu",
        eps=1e-5,
        tied=True,
        kv_heads=heads,
    )
    sizes = replace(sizes, inner=config.int("expansion_ratio", 4, ge=1) * sizes.width)
    if not config.bool("no_bias", True):
        raise config.wrong("no_bias", "true")
    if config.raw.get("logit_scale") is not None:
        raise config.wrong("logit_scale", "null")
    layer = LayerSpec(
        mixer=AttentionSpec(
            **{**plain_attention(sizes), **_attention(config, heads)}, rope=None, names=ATTENTION
        ),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(up="up_proj", down="down_proj", name="ffn"),
    )
    return Decoder(
        scope,
        DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER_NO_BIAS, names=NAMES),
    )


def _attention(config: ConfigReader, heads: int) -> dict[str, Any]:
    """What `attn_config` says: slopes, clipping, and the scale if it is not 1/sqrt(head_dim)."""
    section = config.section("attn_config")
    if section is None:
        return {"slopes": alibi_slopes(heads)}
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        if section.bool(key, False):
            raise section.wrong(key, "false")
    if not section.bool("alibi", True):
        raise section.wrong("alibi", "true: learned positions are not built")
    section.choice("attn_type", {"multihead_attention": ""}, "multihead_attention")
    largest = section.float("alibi_bias_max", LARGEST, ge=1.0)
    stated: dict[str, Any] = {"slopes": alibi_slopes(heads, largest=largest)}
    scale = section.float("softmax_scale", None, ge=0.0)
    if scale is not None:
        stated["scale"] = scale
    return {**stated, "clip": section.float("clip_qkv", None, ge=0.0) or None}

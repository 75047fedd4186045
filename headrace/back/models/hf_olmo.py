"""OLMo 1 as it was first published (Groeneveld et al. 2024, the package hf_olmo): the layers of
OlmoForCausalLM under other names, projections joined (names and keys of the published
checkpoints)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import LAYER_NO_WEIGHT
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(
    prefix="model.transformer",
    embedding="wte",
    layers="blocks",
    norm="ln_f",
    head="model.transformer.ff_out",
)
ATTENTION = AttentionNames(module="attn", merged="att_proj", out="attn_out")
MLP = GatedMLPSpec(merged=MergedTensor(name="ff_proj", parts=(1, 0)), down="ff_out")
"""Ups come before gates."""
RENAMED = (
    (r"\.(att_proj|attn_out)\.", r".attn.\1."),
    (r"(\.\d+)\.(ff_proj|ff_out)\.", r"\1.mlp.\2."),
)
FIXED = {
    "alibi": False,
    "attention_layer_norm": False,
    "include_bias": True,
    "layer_norm_with_affine": True,
    "scale_logits": False,
}
"""What published checkpoints do not have, and what the package takes for granted."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OLMoForCausalLM."""
    for key, usual in FIXED.items():
        if config.bool(key, usual):
            raise config.wrong(key, "false")
    if not config.bool("rope", False):
        raise config.wrong("rope", "true")
    config.choice("layer_norm_type", ("default", "low_precision"), "default")
    config.choice("block_type", ("sequential",), "sequential")
    config.choice("activation_type", ("swiglu",), "swiglu")
    sizes = read_sizes(config, eps=1e-5)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            clip=config.float("clip_qkv", None, ge=0.0),
            names=ATTENTION,
        ),
        feed_forward=MLP,
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER_NO_WEIGHT,
            names=NAMES,
            renamed=RENAMED,
        ),
    )

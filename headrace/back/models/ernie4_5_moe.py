"""ERNIE 4.5 with experts: softmax routing with a bias that only chooses, shared experts, dense
layers at the ends."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.moe import draft_layers, feed_forwards
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Ernie4_5_MoeForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    if config.bool("use_bias", False):
        raise config.wrong("use_bias", "false where there are experts")
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=500_000.0,
        layout="pairs",
    )
    attention = AttentionSpec(**plain_attention(sizes), rope=rope)
    first = config.int("moe_layer_start_index", 1, ge=0)
    last = config.int("moe_layer_end_index", -1, ge=-1)
    every = config.int("moe_layer_interval", 1, ge=1)
    stop = sizes.layers if last == -1 else last + 1
    sparse = [first <= i < stop and (i + 1) % every == 0 for i in range(sizes.layers)]
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=feed_forward)
        for feed_forward in feed_forwards(_mixture(config), sparse)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))


def _mixture(config: ConfigReader) -> MixtureSpec:
    experts = config.int("moe_num_experts", 64, ge=1, aliases=("num_experts",))
    inner = config.int("moe_intermediate_size", ge=1)
    shared = config.int("moe_num_shared_experts", 0, ge=0)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("moe_k", 6, ge=1, le=experts, aliases=("num_experts_per_tok",)),
            renormalize=True,
            bias_name="moe_statics.e_score_correction_bias",
            bias_dims=2,
        ),
        inner=inner,
        shared=SharedSpec(inner=inner * shared) if shared else None,
    )

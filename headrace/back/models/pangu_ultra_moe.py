"""openPangu-Ultra-MoE: DeepSeek-V3's latent attention and experts, with norms before and behind
each branch (Huawei 2025)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.norm import PRE, SANDWICH, NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.moe import (
    BIAS_BESIDE,
    dense_first,
    draft_layers,
    feed_forwards,
    sigmoid_mixture,
)
from headrace.base.config.hf import ConfigReader

NORMS = replace(SANDWICH, before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm")
OTHERS = ("param_sink_number", "index_topk", "sliding_window", "sliding_window_list")
"""What later models have besides."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PanguUltraMoEForCausalLM."""
    refuse_others(config, OTHERS)
    sizes = read_sizes(config, eps=1e-5)
    layout = "pairs" if config.bool("rope_interleave", True) else "half"
    attention = read_latent_attention(scope, config, sizes, layout=layout)
    sparse = dense_first(config, sizes.layers, default=3)
    placement = pangu_placement(config)
    layers = tuple(
        LayerSpec(mixer=attention, placement=placement, feed_forward=feed_forward)
        for feed_forward in feed_forwards(pangu_mixture(config), sparse)
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))


def refuse_others(config: ConfigReader, keys: tuple[str, ...]) -> None:
    """CheckpointError where the config has one of the keys, or what no openPangu here has."""
    for key in keys:
        if config.raw.get(key):
            raise config.wrong(key, "absent")
    for key in ("use_mhc", "use_mome"):
        if config.bool(key, False):
            raise config.wrong(key, "false")


def pangu_mixture(config: ConfigReader) -> MixtureSpec:
    """Sigmoid scores; the bias that chooses, where there is one, lies beside the router."""
    biased = config.bool("router_enable_expert_bias", False)
    mixture = sigmoid_mixture(config, bias_name=BIAS_BESIDE)
    if biased:
        return mixture
    return replace(mixture, router=replace(mixture.router, bias_name=None))


def pangu_placement(config: ConfigReader) -> NormPlacement:
    """With norms behind the branches, or without."""
    return NORMS if config.bool("sandwich_norm", False) else PRE

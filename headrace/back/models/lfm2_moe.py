"""LFM2 with experts: dense layers first; sigmoid routing with a bias that only chooses."""

from __future__ import annotations

from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec
from headrace.back.models.lfm2 import MLP, NAMES, PLACEMENT, lfm2_mixers, lfm2_sizes
from headrace.back.models.mixtral import LAYOUT
from headrace.back.models.moe import scored_by
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Lfm2MoeForCausalLM."""
    sizes = lfm2_sizes(config)
    experts = config.int("num_experts", 32, ge=1)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 4, ge=1, le=experts),
            score=scored_by(config, "sigmoid"),
            renormalize=config.bool("norm_topk_prob", True),
            scale=config.float("routed_scaling_factor", 1.0),
            bias_name="expert_bias" if config.bool("use_expert_bias", True) else None,
        ),
        inner=config.int("moe_intermediate_size", ge=1),
        layout=LAYOUT,
        name=MLP.name,
    )
    dense = config.int("num_dense_layers", 2, ge=0)
    layers = tuple(
        LayerSpec(mixer=mixer, placement=PLACEMENT, feed_forward=MLP if i < dense else mixture)
        for i, mixer in enumerate(lfm2_mixers(scope, config, sizes))
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES))

"""Mistral 4: DeepSeek's latent attention with Llama 4's temperature of far positions, and softmax
routing in groups by their best two."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.moe.weights import MergedExperts
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.ministral3 import read_query_scale
from headrace.back.models.moe import dense_first, feed_forwards, routed_mixture
from headrace.base.config.hf import ConfigReader

LAYOUT = MergedExperts(up="experts.gate_up_proj", down="experts.down_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Mistral4ForCausalLM."""
    sizes = read_sizes(config)
    layout = "pairs" if config.bool("rope_interleave", True) else "half"
    attention = replace(
        read_latent_attention(scope, config, sizes, layout=layout),
        query_scale=read_query_scale(config),
    )
    mixture = routed_mixture(config)
    renormalize = config.bool("norm_topk_prob", True)
    router = replace(mixture.router, renormalize=renormalize, group_score="top2")
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=feed_forward)
        for feed_forward in feed_forwards(
            replace(mixture, router=router, layout=LAYOUT), dense_first(config, sizes.layers)
        )
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))

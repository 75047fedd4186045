"""DeepSeek V3.2: DeepSeek V3 of which each query reads the positions that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_indexer, read_latent_attention
from headrace.back.models.moe import draft_layers, feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekV32ForCausalLM."""
    sizes = read_sizes(config)
    attention = read_latent_attention(scope, config, sizes, layout="pairs")
    indexer = read_indexer(config, attention, layout="half")
    mixer = replace(attention, indexer=indexer)
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=feed_forward)
        for feed_forward in feed_forwards(
            sigmoid_mixture(config), sparse_by_type(config, sizes.layers, dense=3)
        )
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))

"""DeepSeek V3.2 and GLM with DSA: DeepSeek V3 of which each query reads the positions that an
indexer chooses. In GLM a layer may read what the indexer of a layer before it has chosen."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.indexer import Selection
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_indexer, read_latent_attention
from headrace.back.models.moe import draft_layers, feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekV32ForCausalLM."""
    layers = read_sizes(config).layers
    return indexed_decoder(scope, config, shared=[False] * layers, layout="half")


def indexed_decoder(
    scope: Scope, config: ConfigReader, *, shared: list[bool], layout: str
) -> Decoder:
    """The decoder. `shared`: the layers without an indexer of their own; `layout`: of the
    indexers' rotation."""
    sizes = read_sizes(config)
    attention = read_latent_attention(scope, config, sizes, layout="pairs")
    indexer = read_indexer(config, attention, layout=layout)
    if any(shared):
        indexer = replace(indexer, selection=Selection())
    mixers = [replace(attention, indexer=replace(indexer, shared=one)) for one in shared]
    sparse = sparse_by_type(config, sizes.layers, dense=3)
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=feed_forward)
        for mixer, feed_forward in zip(
            mixers, feed_forwards(sigmoid_mixture(config), sparse), strict=True
        )
    )
    ignored = draft_layers(config, sizes.layers)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=ignored))

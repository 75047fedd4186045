"""A.X K2: DeepSeek V3.2 whose norms gate themselves, and what heads give is gated by a projection
of the queries' bottleneck, before and behind its norm."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.gated_block_norm import GatedBlockNormSpec
from headrace.back.layers.norm import PRE
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_indexer, read_latent_attention
from headrace.back.models.moe import feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """AXK2ForCausalLM."""
    sizes = read_sizes(config)
    attention = read_latent_attention(scope, config, sizes, layout="pairs")
    indexer = read_indexer(config, attention, layout="half")
    attention = replace(attention, indexer=indexer, joint_gate=True)
    gated = GatedBlockNormSpec(rank=config.int("gated_norm_rank", 16, ge=1))
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    branches = feed_forwards(sigmoid_mixture(config), sparse)
    layers = tuple(
        LayerSpec(
            mixer=attention,
            feed_forward=feed_forward,
            norms={
                name: gated
                for name in (PRE.before_attention, PRE.before_mlp if is_sparse else None)
                if name is not None
            },
        )
        for is_sparse, feed_forward in zip(sparse, branches, strict=True)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))

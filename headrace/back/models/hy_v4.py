"""Hunyuan v4: GLM's sparse latent attention with sinks and gates of what heads give, in a residual
of several streams; dense layers first, then experts routed as DeepSeek-V3 routes them, the routed
ones with a bound."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import OutputGate
from headrace.back.layers.hyper_connections import HyperSpec
from headrace.back.layers.indexer import Selection
from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec
from headrace.back.layers.moe.beside import BesideSpec, LoneExpert
from headrace.back.layers.moe.weights import MergedExperts
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, read_sizes
from headrace.back.models.hyper_layer import HyperLayerSpec
from headrace.back.models.latent import read_indexer, read_latent_attention
from headrace.back.models.moe import sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader
from headrace.base.config.index_choices import shared_layers

DRAFTS = (r"model\.mtp_layers\..*",)
RENAMED = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head_(fn|base|scale)", r".hc_\1"),
    (r"\.learnable_sink_param", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
)
LAYOUT = MergedExperts(up="experts.gate_up_proj", down="experts.down_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HYV4ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    attention = read_latent_attention(scope, config, sizes)
    indexer = read_indexer(config, attention, layout="half")
    indexer = replace(
        indexer,
        offset=indexer.dim - indexer.rope.rotary_dim,
        eps=sizes.eps,
        selection=Selection(),
    )
    attention = replace(attention, gate=OutputGate(name="gate_proj"), sinks=True)
    streams = HyperSpec(
        streams=config.int("hc_mult", 4, ge=1, le=16),
        eps=config.float("hc_eps", 1e-6, ge=0.0),
        norm_eps=sizes.eps,
        magnitude=config.float("hc_magnitude", 2.0),
        results_eps=True,
    )
    experts = _experts(config)
    layers = tuple(
        HyperLayerSpec(
            mixer=replace(attention, indexer=replace(indexer, shared=shared)),
            feed_forward=experts if sparse else GATED_MLP,
            streams=streams,
        )
        for shared, sparse in zip(
            shared_layers(config, sizes.layers, every=4),
            sparse_by_type(config, sizes.layers, dense=1),
            strict=True,
        )
    )
    spec = DecoderSpec(sizes=sizes, layers=layers, streams=streams, ignored=DRAFTS, renamed=RENAMED)
    return Decoder(scope, spec)


def _experts(config: ConfigReader) -> FeedForwardSpec:
    """Shared experts have no bound, so they stand beside the others."""
    mixture = sigmoid_mixture(config)
    clamp = max(0.0, config.float("swiglu_limit", 10.0))
    routed = replace(mixture, shared=None, clamp=clamp, layout=LAYOUT)
    if mixture.shared is None:
        return routed
    beside = LoneExpert(inner=mixture.shared.inner, name="mlp.shared_experts")
    return BesideSpec(mixture=routed, shared=beside)

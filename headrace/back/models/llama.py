"""Llama 2, 3 and what copies them: pre-norm, grouped queries, gated SiLU, every rope scaling."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """LlamaForCausalLM."""
    return Decoder(scope, llama_decoder(scope, config))


def llama_decoder(
    scope: Scope, config: ConfigReader, *, ignored: tuple[str, ...] = (), layout: str = "half"
) -> DecoderSpec:
    """Llama's decoder; `ignored`: see DecoderSpec; `layout` of the rotation: see kernels/rope."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, layout=layout
    )
    layer = LayerSpec(
        mixer=AttentionSpec(**plain_attention(sizes), rope=rope, qkv_bias=bias, out_bias=bias),
        feed_forward=GatedMLPSpec(bias=config.bool("mlp_bias", False)),
    )
    return DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, ignored=ignored)

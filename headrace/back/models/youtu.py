"""Youtu-LLM: DeepSeek's latent attention in a dense decoder."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """YoutuForCausalLM."""
    sizes = read_sizes(config, tied=True)
    layout = "pairs" if config.bool("rope_interleave", True) else "half"
    layer = LayerSpec(mixer=read_latent_attention(scope, config, sizes, layout=layout))
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

"""PLM (Deng et al. 2025, "PLM: efficient peripheral language models"): a dense decoder with
multi-head latent attention and MLPs of squared ReLU without a gate."""

from __future__ import annotations

from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PLMForCausalLM."""
    sizes = read_sizes(config, gated=False, default_activation="relu2", tied=True)
    layer = LayerSpec(
        mixer=read_latent_attention(scope, config, sizes, layout="pairs"),
        feed_forward=PlainMLPSpec(bias=config.bool("mlp_bias", False)),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))

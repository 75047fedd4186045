"""A.X K1: DeepSeek V3 with a norm behind the experts. Its published checkpoints hold that norm for
dense layers too, which do not use it, and no bias that chooses."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.deepseek import deepseek_decoder
from headrace.back.models.moe import sigmoid_mixture
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """AXK1ForCausalLM."""
    mixture = sigmoid_mixture(config, bias_optional=True)
    layout = "pairs" if config.bool("rope_interleave", True) else "half"
    return deepseek_decoder(
        scope, config, mixture, layout=layout, after_experts="post_mlp_layernorm"
    )

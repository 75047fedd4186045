"""Solar Open: GLM-4.5's decoder with experts in all layers."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.glm4_moe import EPS, glm_moe_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """SolarOpenForCausalLM."""
    sizes = read_sizes(config, eps=EPS)
    return glm_moe_decoder(scope, config, sizes, [True] * sizes.layers)

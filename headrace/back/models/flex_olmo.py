"""FlexOLMo: OLMoE's attention and experts, with OLMo 2's norms behind both branches."""

from __future__ import annotations

from headrace.back.layers.norm import POST
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.olmoe import olmoe_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """FlexOlmoForCausalLM."""
    return olmoe_decoder(scope, config, placement=POST)

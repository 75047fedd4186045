"""GLM with sparse attention (GLM-5): DeepSeek V3.2 with other rotations, whose layers may share
what one indexer chooses."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.deepseek_v32 import indexed_decoder
from headrace.base.config.hf import ConfigReader
from headrace.base.config.index_choices import shared_layers


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GlmMoeDsaForCausalLM."""
    shared = shared_layers(config, read_sizes(config).layers)
    return indexed_decoder(scope, config, shared=shared, layout="pairs")

"""Qwen 3 with experts: Qwen 3's attention, softmax routing without shared experts."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.moe import feed_forwards, sparse_layers
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.qwen3 import qwen3_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3MoeForCausalLM."""
    sizes = read_sizes(config)
    sparse = sparse_layers(config, sizes.layers)
    return qwen3_decoder(scope, config, sizes, feed_forwards(qwen_mixture(config), sparse))

"""dots.llm1: Qwen 3's attention, dense layers first, then experts routed as DeepSeek-V3 routes
them."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.moe import dense_first, feed_forwards, sigmoid_mixture
from headrace.back.models.qwen3 import qwen3_decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Dots1ForCausalLM."""
    sizes = read_sizes(config)
    sparse = dense_first(config, sizes.layers)
    return qwen3_decoder(scope, config, sizes, feed_forwards(sigmoid_mixture(config), sparse))

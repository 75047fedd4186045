"""DeepSeek V2: DeepSeek V3's decoder with experts routed by softmax and, in groups, by each group's
best expert."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.deepseek import deepseek_decoder
from headrace.back.models.moe import routed_mixture
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekV2ForCausalLM."""
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    mixture = routed_mixture(config, grouped=method == "group_limited_greedy")
    return deepseek_decoder(scope, config, mixture, layout="pairs")

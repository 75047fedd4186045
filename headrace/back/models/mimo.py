"""MiMo (Xiaomi 2025), 7B: Qwen 2, beside layers that only draft tokens."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.models import qwen2
from headrace.back.models.blocks import Decoder
from headrace.base.config.hf import ConfigReader

DRAFTERS = r"model\.mtp_layers\..*"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiMoForCausalLM."""
    decoder = qwen2.build(scope, config)
    plan = decoder.weights
    decoder.weights = replace(plan, ignored=(*plan.ignored, DRAFTERS))
    return decoder

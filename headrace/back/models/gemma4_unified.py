"""Gemma 4 unified (12B): Gemma 4 without inputs of each layer, with wider windows."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models import gemma4
from headrace.back.models.blocks import Decoder
from headrace.base.config.hf import ConfigReader

DEFAULTS = {"hidden_size_per_layer_input": 0, "sliding_window": 1024}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma4UnifiedForCausalLM."""
    return gemma4.build(scope, ConfigReader({**DEFAULTS, **config.raw}, config.where))

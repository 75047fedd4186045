"""mT5 (Xue et al. 2021): T5 1.1, whose logits are never scaled."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.models.t5 import T5Form, build_t5
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """MT5ForConditionalGeneration."""
    return build_t5(scope, config, T5Form(scaled=False))

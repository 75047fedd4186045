"""PLBART (Ahmad et al. 2021): BART over programs."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart, learned
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """PLBartForConditionalGeneration."""
    return build_bart(scope, config, BartForm(pre=False), positions=learned(config))

"""Pegasus (Zhang et al. 2020): norms before each branch, sines and cosines as positions."""

from __future__ import annotations

from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """PegasusForConditionalGeneration."""
    form = BartForm(pre=True, embedding_norm=False)
    return build_bart(scope, config, form, positions=SinusoidalPositions())

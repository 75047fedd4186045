"""Blenderbot of 90M (Roller et al. 2020): BART whose decoder norms its embeddings before it adds
positions."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart, learned
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """BlenderbotSmallForConditionalGeneration."""
    form = BartForm(pre=False, normed_first=True)
    return build_bart(scope, config, form, positions=learned(config, unused=0))

"""Blenderbot (Roller et al. 2020): BART with its norms before each branch, and one behind each
stack."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart, learned
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """BlenderbotForConditionalGeneration."""
    form = BartForm(pre=True, embedding_norm=False)
    return build_bart(scope, config, form, positions=learned(config, unused=0))

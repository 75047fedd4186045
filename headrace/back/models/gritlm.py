"""GritLM (Muennighoff et al. 2024): Mistral's decoder, which also embeds, and then lets all tokens
of a text see each other, as far apart as they may be."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.models import mistral
from headrace.back.models.blocks import Decoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GritLM."""
    decoder = mistral.build(replace(scope, mutual="all"), config)
    decoder.state = "pooled whole"
    return decoder

"""UMT5 (Chung et al. 2023): mT5 with a position bias in every layer."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.models.t5 import T5Form, build_t5
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """UMT5ForConditionalGeneration."""
    tied = config.bool("tie_word_embeddings", True)
    return build_t5(scope, config, T5Form(scaled=tied, shared_bias=False))

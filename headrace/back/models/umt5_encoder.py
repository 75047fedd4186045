"""UMT5's encoder alone: T5's with position biases of each layer's own."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import Encoder
from headrace.back.models.t5 import T5Form
from headrace.back.models.t5_encoder import build_t5_encoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """UMT5EncoderModel, UMT5ForTokenClassification."""
    return build_t5_encoder(scope, config, T5Form(scaled=False, shared_bias=False))

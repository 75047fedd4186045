"""Marian (Junczys-Dowmunt et al. 2018), the OPUS-MT translators: norms behind each branch alone,
sines and cosines as positions."""

from __future__ import annotations

from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """MarianMTModel."""
    if not config.bool("share_encoder_decoder_embeddings", True):
        raise config.wrong("share_encoder_decoder_embeddings", "true")
    form = BartForm(pre=False, embedding_norm=False)
    return build_bart(scope, config, form, positions=SinusoidalPositions())

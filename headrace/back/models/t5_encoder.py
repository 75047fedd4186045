"""T5's encoder alone, and mT5's: what embedders are made of (Ni et al. 2021: Sentence-T5, GTR)."""

from __future__ import annotations

from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import Table
from headrace.back.models.encoder import Encoder
from headrace.back.models.t5 import HEAD, IGNORED, T5Form, encoder_layers, encoder_sizes
from headrace.base.config.hf import ConfigReader

DECODER = r"decoder\..*"


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """T5EncoderModel, MT5EncoderModel."""
    return build_t5_encoder(scope, config, T5Form(scaled=False))


def build_t5_encoder(scope: Scope, config: ConfigReader, form: T5Form) -> Encoder:
    """A member of the family."""
    sizes = encoder_sizes(config)
    words = Table(scope / "shared", sizes.vocabulary, sizes.width)
    return Encoder(
        scope,
        sizes,
        embed=lambda batch: words.rows[batch.token_ids_T],
        layers=encoder_layers(scope / "encoder" / "block", config, form),
        norm=RMS.build(scope / "encoder.final_layer_norm", sizes.width, eps=sizes.eps),
        classifier=None,
        ignored=(*IGNORED, HEAD, DECODER),
    )

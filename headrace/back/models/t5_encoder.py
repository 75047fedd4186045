"""T5's encoder alone, and mT5's: what embedders are made of (Ni et al. 2021: Sentence-T5, GTR), and
those that label tokens."""

from __future__ import annotations

from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import Table
from headrace.back.models.encoder import Encoder
from headrace.back.models.t5 import HEAD, IGNORED, T5Form, encoder_layers, encoder_sizes
from headrace.base.config.hf import ConfigReader

DECODER = r"decoder\..*"


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """T5EncoderModel, MT5EncoderModel, T5ForTokenClassification, MT5ForTokenClassification."""
    return build_t5_encoder(scope, config, T5Form(scaled=False))


def build_t5_encoder(scope: Scope, config: ConfigReader, form: T5Form) -> Encoder:
    """A member of the family."""
    sizes, labels = encoder_sizes(config), scope.head.kind == "token"
    inside, classifier = scope, None
    if labels:
        inside = scope / "transformer"
        head = Dense(scope / "classifier", sizes.width, scope.head.num_labels, bias=True)
        classifier = Classifier(head)
    words = Table(inside / "shared", sizes.vocabulary, sizes.width)
    return Encoder(
        scope,
        sizes,
        embed=lambda batch: words.rows[batch.token_ids_T],
        layers=encoder_layers(inside / "encoder" / "block", config, form),
        norm=RMS.build(inside / "encoder.final_layer_norm", sizes.width, eps=sizes.eps),
        classifier=classifier,
        ignored=(*IGNORED, HEAD, DECODER, *(rf"transformer\.{one}" for one in IGNORED)),
    )

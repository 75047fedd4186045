"""ELECTRA (Clark et al. 2020): BERT whose embeddings may be narrower than its layers."""

from __future__ import annotations

from functools import partial

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert
from headrace.back.models.encoder import Encoder
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(wide="embeddings_project")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """ElectraModel, ElectraForSequenceClassification, ElectraForTokenClassification,
    ElectraForMaskedLM."""
    return build_bert(
        scope,
        config,
        prefix="electra",
        first_position=0,
        head=partial(first_token_head, activation="gelu"),
        names=NAMES,
    )

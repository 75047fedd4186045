"""data2vec's text encoder (Baevski et al. 2022): RoBERTa, trained otherwise."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import Encoder
from headrace.back.models.roberta import build_roberta
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """Data2VecTextModel, Data2VecTextForSequenceClassification,
    Data2VecTextForTokenClassification, Data2VecTextForMaskedLM."""
    return build_roberta(scope, config, prefix="data2vec_text")

"""RemBERT (Chung et al. 2021): BERT over many languages, with embeddings narrower than its
layers."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert, pooler_head
from headrace.back.models.encoder import Encoder
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(wide="encoder.embedding_hidden_mapping_in", wide_key="input_embedding_size")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """RemBertModel, RemBertForSequenceClassification, RemBertForTokenClassification,
    RemBertForMaskedLM."""
    return build_bert(
        scope, config, prefix="rembert", first_position=0, head=pooler_head, names=NAMES
    )

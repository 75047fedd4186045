"""Megatron's BERT (Shoeybi et al. 2019): norms before each branch and behind the layers instead of
behind each sum and the embeddings."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert, pooler_head
from headrace.back.models.encoder import Encoder
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(
    embedding_norm=False,
    norm="encoder.ln",
    before_attention="attention.ln",
    before_mlp="ln",
    after_attention=None,
    after_mlp=None,
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """MegatronBertModel, MegatronBertForSequenceClassification,
    MegatronBertForTokenClassification, MegatronBertForMaskedLM."""
    return build_bert(scope, config, prefix="bert", first_position=0, head=pooler_head, names=NAMES)

"""XLM-RoBERTa XL and XXL (Goyal et al. 2021): norms before each branch and behind the layers."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames
from headrace.back.models.encoder import Encoder
from headrace.back.models.roberta import build_roberta
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(
    embedding_norm=False,
    norm="encoder.LayerNorm",
    before_attention="attention.self_attn_layer_norm",
    before_mlp="LayerNorm",
    after_attention=None,
    after_mlp=None,
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """XLMRobertaXLModel, XLMRobertaXLForSequenceClassification,
    XLMRobertaXLForTokenClassification, XLMRobertaXLForMaskedLM."""
    return build_roberta(scope, config, names=NAMES)

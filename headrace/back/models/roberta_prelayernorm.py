"""RoBERTa with norms before each branch and behind the layers (Wettig et al. 2022)."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames
from headrace.back.models.encoder import Encoder
from headrace.back.models.roberta import build_roberta
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(
    norm="LayerNorm",
    before_attention="attention.LayerNorm",
    before_mlp="intermediate.LayerNorm",
    after_attention=None,
    after_mlp=None,
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """RobertaPreLayerNormModel, RobertaPreLayerNormForSequenceClassification,
    RobertaPreLayerNormForTokenClassification, RobertaPreLayerNormForMaskedLM."""
    return build_roberta(scope, config, prefix="roberta_prelayernorm", names=NAMES)

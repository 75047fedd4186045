"""ALBERT (Lan et al. 2020): BERT whose layers share their weights, over narrow embeddings."""

from __future__ import annotations

from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert
from headrace.back.models.encoder import Encoder
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(
    layers="encoder.albert_layer_groups",
    projections=("attention.query", "attention.key", "attention.value"),
    out="attention.dense",
    after_attention="attention.LayerNorm",
    mlp=PlainMLPSpec(name="", up="ffn", down="ffn_output", bias=True),
    after_mlp="full_layer_layer_norm",
    wide="encoder.embedding_hidden_mapping_in",
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """AlbertModel, AlbertForSequenceClassification, AlbertForTokenClassification,
    AlbertForMaskedLM."""
    layers = config.int("num_hidden_layers", ge=1)
    groups = config.int("num_hidden_groups", 1, ge=1, le=layers)
    inner = config.int("inner_group_num", 1, ge=1)
    places = [
        f"{i * groups // layers}.albert_layers.{j}" for i in range(layers) for j in range(inner)
    ]
    return build_bert(
        scope,
        config,
        prefix="albert",
        first_position=0,
        head=_head,
        names=NAMES,
        shared=tuple(places),
    )


def _head(outer: Scope, inner: Scope, width: int) -> Classifier | None:
    """A tanh layer on the first token (the pooler) and the class logits; of tokens the logits
    alone."""
    head = outer.head
    if head.kind == "none":
        return None
    last = Dense(outer / "classifier", width, head.num_labels, bias=True)
    if head.kind == "token":
        return Classifier(last)
    return Classifier(last, first=Dense(inner / "pooler", width, width, bias=True))

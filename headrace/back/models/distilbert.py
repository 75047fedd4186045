"""DistilBERT (Sanh et al. 2019): BERT with half the layers, without token types, under keys and
names of its own."""

from __future__ import annotations

from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert
from headrace.back.models.encoder import Encoder
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(
    layers="transformer.layer",
    projections=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    after_attention="sa_layer_norm",
    mlp=PlainMLPSpec(up="ffn.lin1", down="ffn.lin2", bias=True),
    after_mlp="output_layer_norm",
    typed=False,
)
KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
}
"""Its own keys, and what they are elsewhere."""


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """DistilBertModel, DistilBertForSequenceClassification, DistilBertForTokenClassification,
    DistilBertForMaskedLM."""
    own = {KEYS[key]: value for key, value in config.raw.items() if key in KEYS}
    return build_bert(
        scope,
        ConfigReader({**config.raw, **own}, config.where),
        prefix="distilbert",
        first_position=0,
        head=_head,
        names=NAMES,
    )


def _head(outer: Scope, inner: Scope, width: int) -> Classifier | None:
    """A ReLU layer on the first token and the class logits; of tokens the logits alone."""
    head = outer.head
    if head.kind == "none":
        return None
    last = Dense(outer / "classifier", width, head.num_labels, bias=True)
    if head.kind == "token":
        return Classifier(last)
    first = Dense(outer / "pre_classifier", width, width, bias=True)
    return Classifier(last, first=first, activation="relu")

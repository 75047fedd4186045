"""DeBERTa 2 and 3 (He et al. 2021): BERT whose attention knows contents and distances apart, with
one projection for both."""

from __future__ import annotations

from collections.abc import Callable

from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.disentangled_attention import (
    DisentangledAttention,
    DistanceBuckets,
    DistanceEmbeddings,
)
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert
from headrace.back.models.encoder import Encoder, EncoderSizes, TokenLayer
from headrace.base.config.hf import ConfigReader

PROJECTIONS = (
    "attention.self.query_proj",
    "attention.self.key_proj",
    "attention.self.value_proj",
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """DebertaV2Model, DebertaV2ForSequenceClassification, DebertaV2ForTokenClassification,
    DebertaV2ForMaskedLM."""
    for key, needed in (("relative_attention", True), ("share_att_key", True)):
        if config.bool(key, False) is not needed:
            raise config.wrong(key, "true")
    if config.bool("position_biased_input", True):
        raise config.wrong("position_biased_input", "false")
    if config.int("conv_kernel_size", 0, ge=0):
        raise config.wrong("conv_kernel_size", "0: no convolution beside the first layer")
    check_terms(config)
    names = BertNames(projections=PROJECTIONS, typed=config.int("type_vocab_size", 0, ge=0) > 0)
    return build_bert(
        scope,
        config,
        prefix="deberta",
        first_position=None,
        head=deberta_head,
        names=names,
        attention_of=lambda inside, sizes: _attention(inside, sizes, config),
    )


def check_terms(config: ConfigReader) -> None:
    """Refuses scores that are not of contents and of both ways between contents and distances."""
    stated = config.raw.get("pos_att_type")
    words = stated.lower().split("|") if isinstance(stated, str) else stated or []
    if {word.strip() for word in words} != {"c2p", "p2c"}:
        raise config.wrong("pos_att_type", "c2p and p2c")


def _attention(
    inside: Scope, sizes: EncoderSizes, config: ConfigReader
) -> Callable[[Scope], TokenLayer]:
    farthest = config.int("max_relative_positions", -1, ge=-1)
    if farthest < 1:
        farthest = config.int("max_position_embeddings", 512, ge=2)
    buckets = DistanceBuckets(buckets=config.int("position_buckets", ge=4), farthest=farthest)
    normed = "layer_norm" in str(config.raw.get("norm_rel_ebd", "none")).lower()
    distances = DistanceEmbeddings(
        inside / "encoder", buckets, sizes.width, eps=sizes.eps if normed else None
    )

    def attention(scope: Scope) -> DisentangledAttention:
        return DisentangledAttention(
            scope,
            sizes.width,
            sizes.heads,
            names=PROJECTIONS,
            out="attention.output.dense",
            distances=distances,
        )

    return attention


def deberta_head(outer: Scope, inner: Scope, width: int) -> Classifier | None:
    """A GELU layer on the first token and the class logits; of tokens the logits alone."""
    head = outer.head
    if head.kind == "none":
        return None
    last = Dense(outer / "classifier", width, head.num_labels, bias=True)
    if head.kind == "token":
        return Classifier(last)
    first = Dense(outer / "pooler" / "dense", width, width, bias=True)
    return Classifier(last, first=first, activation="gelu")

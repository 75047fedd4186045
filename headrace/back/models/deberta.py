"""DeBERTa 1 (He et al. 2021): as its successors, with projections of distances that are their own
and an embedding for each distance."""

from __future__ import annotations

from collections.abc import Callable

from headrace.back.layers.disentangled_attention import (
    ApartDisentangledAttention,
    DistanceEmbeddings,
    EachDistance,
)
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BERT, BertNames, build_bert
from headrace.back.models.deberta_v2 import check_terms, deberta_head
from headrace.back.models.encoder import Encoder, EncoderSizes, TokenLayer
from headrace.base.config.hf import ConfigReader

UNUSED = (r"(deberta\.)?embeddings\.position_embeddings\.weight", r"lm_predictions\..*")
"""Positions, where only distances count."""


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """DebertaModel, DebertaForSequenceClassification, DebertaForTokenClassification,
    DebertaForMaskedLM."""
    if not config.bool("relative_attention", False):
        raise config.wrong("relative_attention", "true")
    if config.bool("talking_head", False):
        raise config.wrong("talking_head", "false")
    width = config.int("hidden_size", ge=1)
    if config.int("embedding_size", width, ge=1) != width:
        raise config.wrong("embedding_size", f"hidden_size ({width})")
    check_terms(config)
    positions = config.bool("position_biased_input", True)
    return build_bert(
        scope,
        config,
        prefix="deberta",
        first_position=0 if positions else None,
        head=deberta_head,
        names=BertNames(typed=config.int("type_vocab_size", 0, ge=0) > 0),
        attention_of=lambda inside, sizes: _attention(inside, sizes, config),
        ignored=UNUSED[positions:],
    )


def _attention(
    inside: Scope, sizes: EncoderSizes, config: ConfigReader
) -> Callable[[Scope], TokenLayer]:
    farthest = config.int("max_relative_positions", -1, ge=-1)
    if farthest < 1:
        farthest = config.int("max_position_embeddings", 512, ge=2)
    distances = DistanceEmbeddings(
        inside / "encoder", EachDistance(buckets=farthest), sizes.width, eps=None
    )

    def attention(scope: Scope) -> ApartDisentangledAttention:
        return ApartDisentangledAttention(
            scope / "attention.self",
            sizes.width,
            sizes.heads,
            out=scope / BERT.out,
            distances=distances,
        )

    return attention

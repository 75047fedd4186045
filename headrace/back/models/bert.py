"""BERT (Devlin et al. 2018): learned positions and token types, norms after each branch, biases
everywhere.

RoBERTa and XLM-RoBERTa (roberta.py) share all of it but the first position and the classification
head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

IGNORED = (
    r"(.*\.)?embeddings\.position_ids",
    r"cls\..*",
    r"lm_head\..*",
    r"linear\.weight",  # ColBERT's projection, which load/dense.py reads
)
MLP = PlainMLPSpec(up="intermediate.dense", down="output.dense", bias=True)
POOLER = r"(.*\.)?pooler\..*"


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """BertModel, BertForSequenceClassification, BertForTokenClassification, BertForMaskedLM."""
    return build_bert(scope, config, prefix="bert", first_position=0, head=pooler_head)


def build_bert(
    scope: Scope,
    config: ConfigReader,
    *,
    prefix: str,
    first_position: int,
    head: Callable[[Scope, Scope, int], Classifier | None],
) -> Encoder:
    """The encoder with its tensors under `prefix` unless the checkpoint is bare; text begins at
    `first_position`. `head` makes the classification head from the outer and the inner scope and
    the width."""
    config.choice("position_embedding_type", ("absolute",), "absolute")
    sizes = read_encoder_sizes(config, eps=1e-12)
    inside = scope if scope.head.bare else scope / prefix
    embedded = inside / "embeddings"
    embeddings = BertEmbeddings(
        embedded, sizes, config, norm=embedded / "LayerNorm", first_position=first_position
    )
    layers = [_layer(inside / "encoder" / "layer" / str(i), sizes) for i in range(sizes.layers)]
    classifier = head(scope, inside, sizes.width)
    pooled = scope.head.kind == "sequence" and prefix == "bert"
    return Encoder(
        scope,
        sizes,
        embed=embeddings.embed,
        layers=layers,
        norm=None,
        classifier=classifier,
        ignored=IGNORED if pooled else (*IGNORED, POOLER),
        segments=embeddings.num_types > 1,
    )


def pooler_head(outer: Scope, inner: Scope, width: int) -> Classifier | None:
    """A tanh layer on the first token (the pooler) and the class logits; of tokens the logits
    alone."""
    head = outer.head
    if head.kind == "none":
        return None
    last = Dense(outer / "classifier", width, head.num_labels, bias=True)
    if head.kind == "token":
        return Classifier(last)
    return Classifier(last, first=Dense(inner / "pooler" / "dense", width, width, bias=True))


def _layer(scope: Scope, sizes: EncoderSizes) -> EncoderLayer:
    def norm(scope: Scope) -> LayerNorm:
        return LayerNorm(scope / "LayerNorm", sizes.width, eps=sizes.eps)

    attention = scope / "attention"
    return EncoderLayer(
        attention=SpanAttentionLayer(
            attention, sizes, names=("self.query", "self.key", "self.value"), out="output.dense"
        ),
        after_attention=norm(attention / "output"),
        mlp=PlainMLP(
            scope, MLP, sizes.feed_forward, ElementwiseActivation(scope, sizes.activation)
        ),
        after_mlp=norm(scope / "output"),
    )


class BertEmbeddings:
    """norm(word + position + type). `norm`: its place; text begins at `first_position` of the
    learned positions, None: there are none (a rope tells places apart)."""

    def __init__(
        self,
        scope: Scope,
        sizes: EncoderSizes,
        config: ConfigReader,
        *,
        norm: Scope,
        first_position: int | None,
    ) -> None:
        self.num_types = config.int("type_vocab_size", 2, ge=1)
        self._tables = [
            _Table(scope / "word_embeddings", sizes.vocabulary, sizes.width),
            _Table(scope / "token_type_embeddings", self.num_types, sizes.width),
        ]
        self._first = first_position
        if first_position is not None:
            positions = config.int("max_position_embeddings", 512, ge=1)
            self._tables.append(_Table(scope / "position_embeddings", positions, sizes.width))
        self._norm = LayerNorm(norm, sizes.width, eps=sizes.eps)

    def embed(self, batch: Batch) -> torch.Tensor:
        """x_TE."""
        words, types, *positions = (table.rows for table in self._tables)
        x_TE = F.embedding(batch.token_ids_T, words)
        for table in positions:
            assert self._first is not None
            x_TE = x_TE + F.embedding(batch.positions_T + self._first, table)
        segments_T = batch.segments_T
        x_TE += types[0] if segments_T is None else F.embedding(segments_T, types)
        return self._norm.norm(x_TE)


class _Table:
    """Rows [`count`, `width`] to look up; there after loading."""

    def __init__(self, scope: Scope, count: int, width: int) -> None:
        self.rows = torch.empty(0)
        self._weight = scope.param("weight", (count, width))
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self.rows = self._weight.take()

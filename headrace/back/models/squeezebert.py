"""SqueezeBERT (Iandola et al. 2020): BERT whose linear layers are in groups. Each rank computes all
of it."""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.grouped_dense import GroupedDense, GroupedMLP
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import IGNORED, POOLER, BertEmbeddings, pooler_head
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanHeads,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

NORM_EPS = 1e-12
"""Of the layers, whatever the config says of the embeddings."""


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """SqueezeBertModel, SqueezeBertForSequenceClassification, SqueezeBertForTokenClassification,
    SqueezeBertForMaskedLM."""
    sizes = read_encoder_sizes(config, eps=1e-12)
    if config.int("embedding_size", sizes.width, ge=1) != sizes.width:
        raise config.wrong("embedding_size", f"hidden_size ({sizes.width})")
    inside = scope if scope.head.bare else scope / "transformer"
    embedded = inside / "embeddings"
    embeddings = BertEmbeddings(
        embedded, sizes, config, norm=embedded / "LayerNorm", first_position=0
    )
    layers = [
        _layer(inside / "encoder.layers" / str(i), sizes, config) for i in range(sizes.layers)
    ]
    return Encoder(
        scope,
        sizes,
        embed=embeddings.embed,
        layers=layers,
        norm=None,
        classifier=pooler_head(scope, inside, sizes.width),
        ignored=(*IGNORED, POOLER),
        segments=embeddings.num_types > 1,
    )


def _groups(config: ConfigReader, key: str, default: int, *sizes: int) -> int:
    groups = config.int(key, default, ge=1)
    if any(size % groups for size in sizes):
        raise config.wrong(key, f"a divisor of {' and '.join(map(str, sizes))}")
    return groups


def _layer(scope: Scope, sizes: EncoderSizes, config: ConfigReader) -> EncoderLayer:
    def norm(name: str) -> LayerNorm:
        return LayerNorm(scope / name / "layernorm", sizes.width, eps=NORM_EPS)

    width, inner = sizes.width, sizes.inner
    up, down = (
        _groups(config, f"{name}_groups", 4, width, inner) for name in ("intermediate", "output")
    )
    return EncoderLayer(
        attention=GroupedAttention(scope, sizes, config),
        after_attention=norm("post_attention"),
        mlp=GroupedMLP(
            GroupedDense(scope / "intermediate.conv1d", width, inner, up),
            GroupedDense(scope / "output.conv1d", inner, width, down),
            ElementwiseActivation(scope, sizes.activation),
        ),
        after_mlp=norm("output"),
    )


class GroupedAttention:
    """x_TE -> y_TE: attention whose projections are in groups."""

    def __init__(self, scope: Scope, sizes: EncoderSizes, config: ConfigReader) -> None:
        self._heads, width = sizes.heads, sizes.width
        self._projections = [
            GroupedDense(
                scope / "attention" / name,
                width,
                width,
                _groups(config, f"{name[0]}_groups", 4, width),
            )
            for name in ("query", "key", "value")
        ]
        self._out = GroupedDense(
            scope / "post_attention.conv1d",
            width,
            width,
            _groups(config, "post_attention_groups", 1, width),
        )
        self._spans = SpanHeads(scope, sizes.heads, sizes.heads, sizes.head_dim)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        q_THD, k_THD, v_THD = (
            one.project(x_TE).unflatten(1, (self._heads, -1)) for one in self._projections
        )
        return self._out.project(self._spans.attend(q_THD, k_THD, v_THD, batch).flatten(1))

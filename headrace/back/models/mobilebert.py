"""MobileBERT (Sun et al. 2020): BERT over embeddings of three tokens side by side, whose layers
work in a narrow width, with several MLPs each, and scales and biases instead of norms."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace, PlainMLP
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import IGNORED, MLP, POOLER, Table, pooler_head
from headrace.back.models.encoder import (
    Encoder,
    EncoderSizes,
    SpanHeads,
    TokenNorm,
    read_encoder_sizes,
)
from headrace.back.parallel.shard import Part, local_units
from headrace.base.config.hf import ConfigReader

PLAIN, NORMED = "no_norm", "layer_norm"


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """MobileBertModel, MobileBertForSequenceClassification, MobileBertForTokenClassification,
    MobileBertForMaskedLM."""
    for key in ("use_bottleneck", "key_query_shared_bottleneck"):
        if not config.bool(key, True):
            raise config.wrong(key, "true")
    if config.bool("use_bottleneck_attention", False):
        raise config.wrong("use_bottleneck_attention", "false")
    sizes = read_encoder_sizes(config, eps=1e-12, default_activation="relu")
    inside = scope if scope.head.bare else scope / "mobilebert"
    embeddings = TrigramEmbeddings(inside / "embeddings", sizes, config)
    layers = [
        MobileLayer(inside / "encoder.layer" / str(i), sizes, config) for i in range(sizes.layers)
    ]
    head = pooler_head(scope, inside, sizes.width)
    if scope.head.kind == "sequence" and not config.bool("classifier_activation", True):
        head = Classifier(
            Dense(scope / "classifier", sizes.width, scope.head.num_labels, bias=True)
        )
    return Encoder(
        scope,
        sizes,
        embed=embeddings.embed,
        layers=layers,
        norm=None,
        classifier=head,
        ignored=(*IGNORED, POOLER),
        segments=True,
    )


def _norm(scope: Scope, width: int, config: ConfigReader) -> TokenNorm:
    if config.choice("normalization_type", (PLAIN, NORMED), PLAIN) == PLAIN:
        return ScaleAndBias(scope, width)
    return LayerNorm(scope, width, eps=config.float("layer_norm_eps", 1e-12, ge=0.0))


class ScaleAndBias:
    """x_TE -> x * weight + bias, in the place of a norm."""

    def __init__(self, scope: Scope, width: int) -> None:
        self._weight = scope.param("weight", (width,), init="ones")
        self._bias = scope.param("bias", (width,), init="zeros")
        self._weight_E, self._bias_E = torch.empty(0), torch.empty(0)
        scope.on_finish(self._finish)

    def norm(self, x_TE: torch.Tensor, /) -> torch.Tensor:
        """See the class."""
        return torch.addcmul(self._bias_E, x_TE, self._weight_E)

    def _finish(self) -> None:
        self._weight_E, self._bias_E = self._weight.take(), self._bias.take()


class TrigramEmbeddings:
    """norm(projection(next, own and previous token's embedding) + position + type), where a text's
    ends have zeros beside them."""

    def __init__(self, scope: Scope, sizes: EncoderSizes, config: ConfigReader) -> None:
        narrow = config.int("embedding_size", 128, ge=1)
        self._trigrams = config.bool("trigram_input", True)
        self._words = Table(scope / "word_embeddings", sizes.vocabulary, narrow)
        positions = config.int("max_position_embeddings", 512, ge=1)
        self._positions = Table(scope / "position_embeddings", positions, sizes.width)
        types = config.int("type_vocab_size", 2, ge=1)
        self._types = Table(scope / "token_type_embeddings", types, sizes.width)
        inputs = narrow * (3 if self._trigrams else 1)
        self._wide = WholeLinear(scope / "embedding_transformation", inputs, sizes.width, bias=True)
        self._norm = _norm(scope / "LayerNorm", sizes.width, config)

    def embed(self, batch: Batch) -> torch.Tensor:
        """x_TE."""
        x_TI = F.embedding(batch.token_ids_T, self._words.rows)
        if self._trigrams:
            assert batch.query_start is not None
            texts = [x_TI[a:b] for a, b in pairwise(batch.query_start.tolist())]
            after, before = (
                torch.cat([F.pad(text, pad)[kept] for text in texts])
                for pad, kept in (((0, 0, 0, 1), slice(1, None)), ((0, 0, 1, 0), slice(-1)))
            )
            x_TI = torch.cat((after, x_TI, before), dim=1)
        x_TE = self._wide.project(x_TI) + F.embedding(batch.positions_T, self._positions.rows)
        types, segments_T = self._types.rows, batch.segments_T
        x_TE += types[0] if segments_T is None else F.embedding(segments_T, types)
        return self._norm.norm(x_TE)


class MobileLayer:
    """x_TE -> x behind the layer: down into the narrow width, attention whose values are of the
    wide one, the MLPs, and up again."""

    def __init__(self, scope: Scope, sizes: EncoderSizes, config: ConfigReader) -> None:
        narrow = config.int("intra_bottleneck_size", 128, ge=1)
        if narrow % sizes.heads:
            raise config.wrong("intra_bottleneck_size", f"a multiple of {sizes.heads} heads")

        def norm(name: str, width: int = narrow) -> TokenNorm:
            return _norm(scope / name / "LayerNorm", width, config)

        down = ("bottleneck.input", "bottleneck.attention")
        self._down = [
            WholeLinear(scope / one / "dense", sizes.width, narrow, bias=True) for one in down
        ]
        self._down_norms = [norm(one) for one in down]
        inside = scope / "attention.self"
        q, k, v = (Part(name, narrow, sizes.heads) for name in ("query", "key", "value"))
        self._heads = local_units(q, scope.mesh.tp)
        self._qk = ColumnLinear(inside, narrow, (q, k), bias=True)
        self._v = ColumnLinear(inside, sizes.width, (v,), bias=True)
        self._spans = SpanHeads(scope, self._heads, self._heads, narrow // sizes.heads)
        self._out = RowLinear(scope / "attention.output.dense", q, narrow, bias=True)
        self._after_attention = norm("attention.output")
        count = config.int("num_feedforward_networks", 4, ge=1)
        places = [*(f"ffn.{i}" for i in range(count - 1)), ""]
        place = FeedForwardPlace(width=narrow, inner=sizes.inner, activation=sizes.activation)
        self._mlps = [
            (
                PlainMLP(at, MLP, place, ElementwiseActivation(at, sizes.activation)),
                _norm(at / "output.LayerNorm", narrow, config),
            )
            for at in (scope / one if one else scope for one in places)
        ]
        self._up = WholeLinear(scope / "output.bottleneck.dense", narrow, sizes.width, bias=True)
        self._after = norm("output.bottleneck", sizes.width)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        y_TN, shared_TN = (
            norm.norm(down.project(x_TE))
            for down, norm in zip(self._down, self._down_norms, strict=True)
        )
        qk_TC = self._qk.project(shared_TN).unflatten(1, (2 * self._heads, -1))
        q_THD, k_THD = qk_TC.split_with_sizes([self._heads] * 2, dim=1)
        v_THD = self._v.project(x_TE).unflatten(1, (self._heads, -1))
        mixed_TX = self._spans.attend(q_THD, k_THD, v_THD, batch).flatten(1)
        y_TN = self._after_attention.norm(self._out.project(mixed_TX) + y_TN)
        for mlp, norm in self._mlps:
            y_TN = norm.norm(mlp.forward(y_TN) + y_TN)
        return self._after.norm(self._up.project(y_TN) + x_TE)

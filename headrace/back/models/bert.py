"""BERT (Devlin et al. 2018): learned positions and token types, norms after each branch, biases
everywhere.

RoBERTa and XLM-RoBERTa (roberta.py) share all of it but the first position and the classification
head; MPNet, DistilBERT and ELECTRA differ in names and embeddings besides, Megatron's BERT and
XLM-RoBERTa XL in where the norms stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense, WordWeights
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.position_bias import RelativeBias, SlopeBias
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    FrameHead,
    SpanAttentionLayer,
    TokenBranch,
    TokenLayer,
    TokenNorm,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

IGNORED = (
    r"(.*\.)?embeddings\.position_ids",
    r"(.*\.)?encoder\.embed_positions\.weight",  # RoFormer's sines and cosines
    r"cls\..*",
    r"(lm_head|(discriminator|generator)_predictions|generator_lm_head)\..*",
    r"(lm|mask)_predictions\..*",
    r"vocab_(transform|layer_norm|projector)\..*",
    r"linear\.weight",  # ColBERT's projection, which load/dense.py reads
)
MLP = PlainMLPSpec(up="intermediate.dense", down="output.dense", bias=True)
POOLER = r"(.*\.)?pooler\..*"


@dataclass(frozen=True, kw_only=True)
class BertNames:
    """Where the layers lie in the model, and the tensors of one in it. Norms come behind the sums
    (`after_*`) or before the branches (`before_*`), then one behind the layers (`norm`);
    `behind_attention`: of the branch itself; None: there is no such norm. `typed`: tokens have
    types, each with a row of its own. `wide`: the projection of narrow embeddings, whose width is
    under `wide_key`; `renamed`: see WeightPlan."""

    layers: str = "encoder.layer"
    embedding_norm: bool = True
    norm: str | None = None
    before_attention: str | None = None
    before_mlp: str | None = None
    projections: tuple[str, str, str] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    out: str = "attention.output.dense"
    behind_attention: str | None = None
    after_attention: str | None = "attention.output.LayerNorm"
    mlp: PlainMLPSpec = MLP
    after_mlp: str | None = "output.LayerNorm"
    typed: bool = True
    wide: str | None = None
    wide_key: str = "embedding_size"
    renamed: tuple[tuple[str, str], ...] = ()


BERT = BertNames()


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """BertModel, BertForSequenceClassification, BertForTokenClassification, BertForMaskedLM."""
    return build_bert(scope, config, prefix="bert", first_position=0, head=pooler_head)


def build_bert(
    scope: Scope,
    config: ConfigReader,
    *,
    prefix: str,
    first_position: int | None,
    head: Callable[[Scope, Scope, int], FrameHead | None],
    names: BertNames = BERT,
    bias_of: Callable[[Scope, EncoderSizes], RelativeBias | SlopeBias] | None = None,
    attention_of: Callable[[Scope, EncoderSizes], Callable[[Scope], TokenLayer]] | None = None,
    mlp_of: Callable[[Scope, EncoderSizes], TokenBranch] | None = None,
    tail_of: Callable[[Scope, EncoderSizes], TokenNorm] | None = None,
    shared: tuple[str, ...] | None = None,
    num_tasks: int = 0,
    ignored: tuple[str, ...] = (),
) -> Encoder:
    """The encoder with its tensors under `prefix` unless the checkpoint is bare; text begins at
    `first_position`, None: positions have no embeddings. `head` makes the classification head from
    the outer and the inner scope and the width, `bias_of` what all layers add to scores,
    `attention_of` what makes the attention of a layer, where it is another, `mlp_of` and `tail_of`
    its MLP and what stands behind it. `shared`: where each layer lies, if several are the same one;
    `num_tasks`: rows of tasks, whose first every token is given; `ignored`: tensors besides."""
    config.choice("position_embedding_type", ("absolute",), "absolute")
    sizes = read_encoder_sizes(config, eps=1e-12)
    inside = scope if scope.head.bare else scope / prefix
    embedded = inside / "embeddings"
    embeddings = BertEmbeddings(
        embedded,
        sizes,
        config,
        norm=embedded / "LayerNorm" if names.embedding_norm else None,
        first_position=first_position,
        typed=names.typed,
        wide=None if names.wide is None else inside / names.wide,
        wide_key=names.wide_key,
        num_tasks=num_tasks,
    )
    bias = None if bias_of is None else bias_of(inside, sizes)
    attention = None if attention_of is None else attention_of(inside, sizes)
    places = shared or tuple(str(i) for i in range(sizes.layers))
    built: dict[str, EncoderLayer] = {}
    for place in dict.fromkeys(places):
        at = inside / names.layers / place
        mlp = None if mlp_of is None else mlp_of(at, sizes)
        tail = None if tail_of is None else tail_of(at, sizes)
        built[place] = _layer(at, sizes, names, bias, attention, mlp, tail)
    norm = None
    if names.norm is not None:
        norm = LayerNorm(inside / names.norm, sizes.width, eps=sizes.eps)
    return Encoder(
        scope,
        sizes,
        embed=embeddings.embed,
        layers=[built[place] for place in places],
        norm=norm,
        classifier=_words(scope, sizes, embeddings) or head(scope, inside, sizes.width),
        ignored=(*IGNORED, POOLER, *ignored),
        segments=embeddings.num_types > 1,
        renamed=names.renamed,
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


def _words(scope: Scope, sizes: EncoderSizes, embeddings: BertEmbeddings) -> WordWeights | None:
    """The language-model head as BERT has it, whose matrix is the embeddings', if it is asked."""
    if scope.head.kind != "words":
        return None
    return WordWeights(
        scope / "cls" / "predictions",
        sizes.width,
        sizes.vocabulary,
        table=embeddings.rows,
        activation=sizes.activation,
        eps=sizes.eps,
    )


def _layer(
    scope: Scope,
    sizes: EncoderSizes,
    names: BertNames,
    bias: RelativeBias | SlopeBias | None,
    attention_of: Callable[[Scope], TokenLayer] | None,
    mlp: TokenBranch | None,
    tail: TokenNorm | None,
) -> EncoderLayer:
    def norm(name: str | None) -> LayerNorm | None:
        return None if name is None else LayerNorm(scope / name, sizes.width, eps=sizes.eps)

    if mlp is None:
        activation = ElementwiseActivation(scope, sizes.activation)
        mlp = PlainMLP(scope, names.mlp, sizes.feed_forward, activation)
    if attention_of is None:
        attention: TokenLayer = SpanAttentionLayer(
            scope, sizes, names=names.projections, out=names.out, position_bias=bias
        )
    else:
        attention = attention_of(scope)
    return EncoderLayer(
        before_attention=norm(names.before_attention),
        attention=attention,
        behind_attention=norm(names.behind_attention),
        after_attention=norm(names.after_attention),
        before_mlp=norm(names.before_mlp),
        mlp=mlp,
        after_mlp=norm(names.after_mlp) if tail is None else tail,
    )


class BertEmbeddings:
    """norm(word + position + type). `norm`: its place, None: there is none; text begins at
    `first_position` of the learned positions, None: there are none (a rope tells places apart).
    `typed`: tokens have types; `num_tasks`: rows of tasks, of which the first is added. Where the
    width under `wide_key` is not the model's, a projection `wide` follows."""

    def __init__(
        self,
        scope: Scope,
        sizes: EncoderSizes,
        config: ConfigReader,
        *,
        norm: Scope | None,
        first_position: int | None,
        typed: bool = True,
        wide: Scope | None = None,
        wide_key: str = "embedding_size",
        num_tasks: int = 0,
    ) -> None:
        width = sizes.width
        if wide is not None:
            width = config.int(wide_key, width, ge=1)
        self._words = Table(scope / "word_embeddings", sizes.vocabulary, width)
        self.num_types = config.int("type_vocab_size", 2, ge=0) if typed else 0
        self._types = self._positions = self._tasks = None
        if num_tasks:
            self._tasks = Table(scope / "task_type_embeddings", num_tasks, width)
        if self.num_types:
            self._types = Table(scope / "token_type_embeddings", self.num_types, width)
        self._first = first_position
        if first_position is not None:
            positions = config.int("max_position_embeddings", 512, ge=1)
            self._positions = Table(scope / "position_embeddings", positions, width)
        self._norm = None if norm is None else LayerNorm(norm, width, eps=sizes.eps)
        self._wide = None
        if wide is not None and width != sizes.width:
            self._wide = WholeLinear(wide, width, sizes.width, bias=True)

    def rows(self) -> torch.Tensor:
        """The words' rows."""
        return self._words.rows

    def embed(self, batch: Batch) -> torch.Tensor:
        """x_TE."""
        x_TE = F.embedding(batch.token_ids_T, self._words.rows)
        if self._positions is not None:
            assert self._first is not None
            x_TE = x_TE + F.embedding(batch.positions_T + self._first, self._positions.rows)
        if self._types is not None:
            types, segments_T = self._types.rows, batch.segments_T
            x_TE += types[0] if segments_T is None else F.embedding(segments_T, types)
        if self._tasks is not None:
            x_TE += self._tasks.rows[0]
        if self._norm is not None:
            x_TE = self._norm.norm(x_TE)
        return x_TE if self._wide is None else self._wide.project(x_TE)


class Table:
    """Rows [`count`, `width`] to look up; there after loading."""

    def __init__(self, scope: Scope, count: int, width: int) -> None:
        self.rows = torch.empty(0)
        self._weight = scope.param("weight", (count, width))
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self.rows = self._weight.take()

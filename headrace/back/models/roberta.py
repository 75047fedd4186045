"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa: BERT whose positions begin behind the padding id, with
a head of its own on the first token."""

from __future__ import annotations

from collections.abc import Callable

from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BERT, BertNames, build_bert
from headrace.back.models.encoder import Encoder, EncoderSizes, TokenNorm
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """RobertaModel, XLMRobertaModel, and their ForSequenceClassification, ForTokenClassification,
    ForMaskedLM."""
    return build_roberta(scope, config)


def build_roberta(
    scope: Scope,
    config: ConfigReader,
    *,
    prefix: str = "roberta",
    names: BertNames = BERT,
    tail_of: Callable[[Scope, EncoderSizes], TokenNorm] | None = None,
    ignored: tuple[str, ...] = (),
) -> Encoder:
    """A member of the family; `prefix`: of its base model's tensors; `tail_of`, `ignored`: see
    build_bert."""
    return build_bert(
        scope,
        config,
        prefix=prefix,
        first_position=config.int("pad_token_id", 1, ge=0) + 1,
        head=first_token_head,
        names=names,
        tail_of=tail_of,
        ignored=ignored,
    )


def first_token_head(
    outer: Scope, inner: Scope, width: int, *, activation: str = "tanh"
) -> Classifier | None:
    """A layer with that activation on the first token and the class logits, both below
    `classifier`; of tokens the logits alone."""
    head = outer.head
    if head.kind == "none":
        return None
    if head.kind == "token":
        return Classifier(Dense(outer / "classifier", width, head.num_labels, bias=True))
    classifier = outer / "classifier"
    return Classifier(
        Dense(classifier / "out_proj", width, head.num_labels, bias=True),
        first=Dense(classifier / "dense", width, width, bias=True),
        activation=activation,
    )

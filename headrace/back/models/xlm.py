"""XLM (Conneau and Lample 2019) and FlauBERT (Le et al. 2020): BERT without token types, its
layers' parts in lists of their own. Embeddings of languages are not read: no request names one."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import IGNORED, Table
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

KEYS = {
    "hidden_size": ("emb_dim",),
    "num_attention_heads": ("n_heads",),
    "num_hidden_layers": ("n_layers", "n_layer"),
    "vocab_size": ("n_words",),
}
"""What other encoders call it, and what it calls itself."""
MLP = PlainMLPSpec(name="", up="lin1", down="lin2", bias=True)
UNREAD = (
    r"(transformer\.)?lang_embeddings\.weight",
    r"(transformer\.)?position_ids",
    r"pred_layer\..*",
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """XLMModel, XLMForSequenceClassification, XLMForTokenClassification, XLMWithLMHeadModel, and
    Flaubert's."""
    for key in ("causal", "asm"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    own = {
        key: next((config.raw[one] for one in names if one in config.raw), None)
        for key, names in KEYS.items()
    }
    stated = {key: value for key, value in own.items() if value is not None}
    reader = ConfigReader({**config.raw, **stated}, config.where)
    inner = 4 * reader.int("hidden_size", ge=1)
    activation = "gelu" if config.bool("gelu_activation", True) else "relu"
    reader = ConfigReader(
        {**reader.raw, "intermediate_size": inner, "hidden_act": activation}, config.where
    )
    sizes = read_encoder_sizes(reader, eps=1e-12)
    inside = scope if scope.head.bare else scope / "transformer"
    words = Table(inside / "embeddings", sizes.vocabulary, sizes.width)
    count = config.int("max_position_embeddings", 512, ge=1)
    positions = Table(inside / "position_embeddings", count, sizes.width)
    norm = LayerNorm(inside / "layer_norm_emb", sizes.width, eps=sizes.eps)

    def embed(batch: Batch) -> torch.Tensor:
        x_TE = F.embedding(batch.token_ids_T, words.rows)
        return norm.norm(x_TE + F.embedding(batch.positions_T, positions.rows))

    first = config.bool("pre_norm", False)
    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=[_layer(inside, str(i), sizes, first=first) for i in range(sizes.layers)],
        norm=None,
        classifier=_head(scope, config, sizes.width),
        ignored=(*IGNORED, *UNREAD),
    )


def _layer(inside: Scope, number: str, sizes: EncoderSizes, *, first: bool) -> EncoderLayer:
    """`first`: norms come before the branches."""
    norms = [
        LayerNorm(inside / name / number, sizes.width, eps=sizes.eps)
        for name in ("layer_norm1", "layer_norm2")
    ]
    at = inside / "ffns" / number
    layer = EncoderLayer(
        attention=SpanAttentionLayer(
            inside / "attentions" / number, sizes, names=("q_lin", "k_lin", "v_lin"), out="out_lin"
        ),
        mlp=PlainMLP(at, MLP, sizes.feed_forward, ElementwiseActivation(at, sizes.activation)),
    )
    if first:
        return replace(layer, before_attention=norms[0], before_mlp=norms[1])
    return replace(layer, after_attention=norms[0], after_mlp=norms[1])


def _head(outer: Scope, config: ConfigReader, width: int) -> Classifier | None:
    """The class logits of the first token, or of each."""
    head = outer.head
    if head.kind == "none":
        return None
    if head.kind == "token":
        return Classifier(Dense(outer / "classifier", width, head.num_labels, bias=True))
    config.choice("summary_type", ("first",), "first")
    if not config.bool("summary_use_proj", True) or config.raw.get("summary_activation"):
        raise config.wrong("summary_use_proj", "true, without summary_activation")
    if not config.bool("summary_proj_to_labels", True):
        raise config.wrong("summary_proj_to_labels", "true")
    return Classifier(
        Dense(outer / "sequence_summary" / "summary", width, head.num_labels, bias=True)
    )

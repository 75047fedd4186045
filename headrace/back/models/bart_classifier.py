"""BART as a classifier (Lewis et al. 2020, section 3.1): the text goes into the encoder and,
one place later, into the decoder, whose last state is judged. No cache is kept: a text is read
once. T tokens, E hidden size.
"""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.span_attention.op import OP as SPAN_ATTENTION
from headrace.back.kernels.span_attention.op import SpanAttentionProblem
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP
from headrace.back.layers.norm import LAYER
from headrace.back.layers.position_bias import CausalBias
from headrace.back.layers.positions import Positions
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.bart import (
    CROSS_NAMES,
    EPS,
    MLP,
    NORMS,
    BartForm,
    bart_encoder_layer,
    encoder_sizes,
    learned,
)
from headrace.back.models.bert import Table
from headrace.back.models.encoder import Encoder, EncoderSizes, SpanAttentionLayer
from headrace.back.parallel.shard import Part, local_units
from headrace.base.config.hf import ConfigReader

WRAPS = "plbart"
"""The type of models whose decoder begins with a text's last token."""
IGNORED = (
    r"model\.(encoder|decoder)\.embed_tokens\.weight",
    r"final_logits_bias",
    r"lm_head\.weight",
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """BartForSequenceClassification, MvpForSequenceClassification,
    PLBartForSequenceClassification."""
    inside, form = scope / "model", BartForm(pre=False)
    sizes, decoded = encoder_sizes(config), encoder_sizes(config, "decoder")
    words = Table(inside / "shared", sizes.vocabulary, sizes.width)
    scale = sizes.width**0.5 if config.bool("scale_embedding", False) else 1.0
    read, said = (_Beginning(inside / stack, sizes, config) for stack in ("encoder", "decoder"))
    layers = [
        bart_encoder_layer(inside / "encoder.layers" / str(i), sizes, form, i)
        for i in range(sizes.layers)
    ]
    decoder = [_Layer(inside / "decoder.layers" / str(i), decoded) for i in range(decoded.layers)]
    if config.bool("use_prompt", False):
        raise config.wrong("use_prompt", "false")
    start = None
    if config.str("model_type", "bart") != WRAPS:
        start = config.int("decoder_start_token_id", 2, ge=0)

    def embed(batch: Batch) -> torch.Tensor:
        return read.begin(words.rows[batch.token_ids_T] * scale, batch)

    def decode(source_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        x_TE = said.begin(words.rows[_one_later(batch, start)] * scale, batch)
        for layer in decoder:
            x_TE = layer.forward(x_TE, source_TE, batch)
        return x_TE

    labels = scope.head.num_labels
    head = scope / "classification_head"
    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=layers,
        norm=None,
        classifier=Classifier(
            Dense(head / "out_proj", sizes.width, labels, bias=True),
            first=Dense(head / "dense", sizes.width, sizes.width, bias=True),
        ),
        ignored=IGNORED,
        behind=decode,
    )


def _one_later(batch: Batch, start: int | None) -> torch.Tensor:
    """The decoder's ids_T: each text without its last token, behind the token it begins with; None:
    that last one."""
    ids_T, begins_T = batch.token_ids_T.roll(1), batch.positions_T == 0
    if start is not None:
        return ids_T.masked_fill(begins_T, start)
    assert batch.query_start is not None
    ends_N = torch.as_tensor(batch.query_start[1:], device=ids_T.device).long() - 1
    ids_T[begins_T] = batch.token_ids_T[ends_N]
    return ids_T


class _Beginning:
    """What stands before the layers of a stack."""

    def __init__(self, scope: Scope, sizes: EncoderSizes, config: ConfigReader) -> None:
        self._positions: Positions = learned(config).build(scope, sizes.width)
        self._norm = LAYER.build(scope / "layernorm_embedding", sizes.width, eps=EPS)

    def begin(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the first layer gets of embeddings."""
        return self._norm.norm(x_TE + self._positions.lookup(batch.positions_T))


class _Layer:
    def __init__(self, scope: Scope, sizes: EncoderSizes) -> None:
        self._norms = [LAYER.build(scope / name, sizes.width, eps=EPS) for name in NORMS]
        self._attention = SpanAttentionLayer(
            scope / "self_attn",
            sizes,
            names=("q_proj", "k_proj", "v_proj"),
            out="out_proj",
            position_bias=CausalBias(scope, sizes.heads, reach=scope.max_positions),
        )
        self._cross = _CrossSpans(scope, sizes)
        activation = ElementwiseActivation(scope, sizes.activation)
        self._mlp = PlainMLP(scope, MLP, sizes.feed_forward, activation)

    def forward(self, x_TE: torch.Tensor, source_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x behind it."""
        own, cross, mlp = self._norms
        x_TE = own.norm(x_TE + self._attention.forward(x_TE, batch))
        x_TE = cross.norm(x_TE + self._cross.forward(x_TE, source_TE, batch))
        return mlp.norm(x_TE + self._mlp.forward(x_TE))


class _CrossSpans:
    """Queries of one half over keys and values of the other, of as many tokens, text by text."""

    def __init__(self, scope: Scope, sizes: EncoderSizes) -> None:
        module, *projections, out = CROSS_NAMES
        scope = scope / module
        size = sizes.heads * sizes.head_dim
        query, key, value = (Part(name, size, sizes.heads) for name in projections)
        self._sizes, self._scope = sizes, scope
        self._heads = local_units(query, scope.mesh.tp)
        self._query = ColumnLinear(scope, sizes.width, (query,), bias=True)
        self._key_value = ColumnLinear(scope, sizes.width, (key, value), bias=True)
        self._out = RowLinear(scope / out, query, sizes.width, bias=True)
        self._attend = not_loaded
        scope.on_finish(self._finish)

    def forward(self, x_TE: torch.Tensor, source_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """y_TE."""
        q_THD = self._query.project(x_TE).unflatten(1, (self._heads, -1))
        both = self._key_value.project(source_TE).unflatten(1, (2 * self._heads, -1))
        k_THD, v_THD = both.split_with_sizes([self._heads] * 2, dim=1)
        assert batch.query_start is not None
        y_THD = self._attend(q_THD, k_THD, v_THD, batch.query_start.tolist())
        return self._out.project(y_THD.reshape(x_TE.shape[0], -1))

    def _finish(self) -> None:
        problem = SpanAttentionProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            heads=self._heads,
            kv_heads=self._heads,
            head_dim=self._sizes.head_dim,
            scale=self._sizes.head_dim**-0.5,
        )
        self._attend = self._scope.bind(SPAN_ATTENTION, problem)

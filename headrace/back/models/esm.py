"""ESM 1b and 2 (Lin et al. 2023), over proteins: norms before each branch and behind the layers,
rotary or learned positions. Embeddings are scaled by the share of tokens that training left, masks
are zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BERT, IGNORED, MLP, POOLER, Table
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

PREFIX = "esm"
KEPT = 1 - 0.15 * 0.8
"""Of the tokens in training: 15 % were chosen, of which 80 % were masked."""
UNREAD = (r"(.*\.)?contact_head\..*", r".*\.rotary_embeddings\.inv_freq")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """EsmModel, EsmForSequenceClassification, EsmForTokenClassification, EsmForMaskedLM."""
    places = config.choice("position_embedding_type", ("absolute", "rotary"), "absolute")
    sizes = read_encoder_sizes(config, eps=1e-12)
    inside = scope if scope.head.bare else scope / PREFIX
    rope = None
    if places == "rotary":
        rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)

    def layer(at: Scope) -> EncoderLayer:
        return EncoderLayer(
            before_attention=LayerNorm(at / "attention.LayerNorm", sizes.width, eps=sizes.eps),
            attention=SpanAttentionLayer(
                at, sizes, names=BERT.projections, out=BERT.out, rope=rope
            ),
            before_mlp=LayerNorm(at / "LayerNorm", sizes.width, eps=sizes.eps),
            mlp=PlainMLP(at, MLP, sizes.feed_forward, ElementwiseActivation(at, sizes.activation)),
        )

    return Encoder(
        scope,
        sizes,
        embed=_Embeddings(inside / "embeddings", sizes, config, learned=rope is None).embed,
        layers=[layer(inside / "encoder.layer" / str(i)) for i in range(sizes.layers)],
        norm=LayerNorm(inside / "encoder.emb_layer_norm_after", sizes.width, eps=sizes.eps),
        classifier=first_token_head(scope, inside, sizes.width),
        ignored=(*IGNORED, POOLER, *UNREAD),
    )


class _Embeddings:
    def __init__(
        self, scope: Scope, sizes: EncoderSizes, config: ConfigReader, *, learned: bool
    ) -> None:
        self._words = Table(scope / "word_embeddings", sizes.vocabulary, sizes.width)
        self._first = config.int("pad_token_id", 1, ge=0) + 1
        self._positions = self._norm = self._mask = None
        if learned:
            rows = config.int("max_position_embeddings", 1026, ge=1)
            self._positions = Table(scope / "position_embeddings", rows, sizes.width)
        if config.bool("emb_layer_norm_before", False):
            self._norm = LayerNorm(scope / "layer_norm", sizes.width, eps=sizes.eps)
        if config.bool("token_dropout", False):
            self._mask = config.int("mask_token_id", ge=0)

    def embed(self, batch: Batch) -> torch.Tensor:
        """x_TE."""
        x_TE = F.embedding(batch.token_ids_T, self._words.rows)
        if self._mask is not None:
            x_TE = x_TE * self._kept(batch, self._mask).to(x_TE.dtype)[:, None]
        if self._positions is not None:
            x_TE = x_TE + F.embedding(batch.positions_T + self._first, self._positions.rows)
        return x_TE if self._norm is None else self._norm.norm(x_TE)

    def _kept(self, batch: Batch, mask: int) -> torch.Tensor:
        """What each token's embedding is multiplied with: 0 of masks, else the share that training
        left over the share that its own text leaves."""
        device = batch.token_ids_T.device
        lengths = torch.as_tensor(batch.query_start, device=device).long().diff()
        text_T = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        masked_T = (batch.token_ids_T == mask).float()
        masked = torch.zeros(len(lengths), device=device).index_add_(0, text_T, masked_T)
        return (1 - masked_T) * KEPT / (1 - masked / lengths)[text_T]

"""ESMC (2026), over proteins: Llama's layers with layer norms, of which each token sees both sides,
norms of all queries and all keys, and branches that are divided by the root of a depth."""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.back.models.eurobert import PROJECTIONS
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

DEPTH = 36
"""Of the model whose branches are added as they are."""
IGNORED = (r"lm_head\..*",)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """EsmcModel, EsmcForSequenceClassification, EsmcForMaskedLM."""
    inside = scope if scope.head.bare else scope / "esmc"
    sizes = read_encoder_sizes(config, eps=1e-5, default_activation="silu")
    words = TokenEmbedding(inside / "embed_tokens", sizes.vocabulary, sizes.width)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)

    def embed(batch: Batch) -> torch.Tensor:
        return words.lookup(batch.token_ids_T)

    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=[_layer(inside / "layers" / str(i), sizes, rope) for i in range(sizes.layers)],
        norm=LayerNorm(inside / "norm", sizes.width, eps=sizes.eps, bias=False),
        classifier=first_token_head(scope, inside, sizes.width),
        ignored=IGNORED,
    )


def _layer(scope: Scope, sizes: EncoderSizes, rope: RopeSpec) -> EncoderLayer:
    at, share = scope / "self_attn", Share((DEPTH / sizes.layers) ** 0.5)
    of_q, of_k = (
        LayerNorm(at / name, sizes.width, eps=sizes.eps, bias=False)
        for name in ("q_norm", "k_norm")
    )
    return EncoderLayer(
        before_attention=LayerNorm(scope / "input_layernorm", sizes.width, eps=sizes.eps),
        attention=SpanAttentionLayer(
            at,
            sizes,
            names=PROJECTIONS,
            out="o_proj",
            bias=False,
            rope=rope,
            wide_norms=(of_q, of_k),
        ),
        behind_attention=share,
        before_mlp=LayerNorm(scope / "post_attention_layernorm", sizes.width, eps=sizes.eps),
        mlp=GatedMLP(scope / "mlp", sizes.feed_forward),
        behind_mlp=share,
    )


class Share:
    """In the place of a norm behind a branch: its results times a factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        return x_TE * self._factor

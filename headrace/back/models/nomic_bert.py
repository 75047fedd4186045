"""Nomic Embed (Nussbaum et al. 2024): BERT with rotary instead of learned positions, gated MLPs and
no biases.

Jina Embeddings v3 (jina_embeddings_v3.py) shares all of it but the MLP, the biases and the
classification head. Tensors are named as the authors' checkpoints and transformers' own ones name
them: one for queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.back.layers.classifier import Classifier
from headrace.back.layers.mlp import GatedMLP, PlainMLP
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import IGNORED, POOLER, BertEmbeddings, pooler_head
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

_GATE_UP_DOWN = ("fc12", "fc11", "fc2")


@dataclass(frozen=True, kw_only=True)
class RotaryBert:
    """What these families do not share. `prefix`: of the base model's tensors; `layers`: where they
    lie in it; `embedding_norm`: the norm of tokens; `attention`: that module in a layer, with its
    `merged` projection and the one `out`; `norms`: behind both branches; `biased`: whether
    projections are; `theta`: the rope's usual base, where there is no `rope` read already;
    `pools`: the head takes the base model's pooler; `mlp`, `head` make these parts."""

    prefix: str
    attention: str
    biased: bool
    eps: float
    pools: bool
    mlp: Callable[[Scope, EncoderSizes], PlainMLP | GatedMLP]
    head: Callable[[Scope, Scope, int], Classifier | None]
    theta: float = 10_000.0
    rope: RopeSpec | None = None
    layers: str = "encoder.layers"
    embedding_norm: str = "emb_ln"
    merged: str = "Wqkv"
    out: str = "out_proj"
    norms: tuple[str, str] = ("norm1", "norm2")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """NomicBertModel, NomicBertForSequenceClassification, NomicBertForTokenClassification,
    NomicBertForMaskedLM."""
    kind = RotaryBert(
        prefix="nomic_bert",
        attention="attn",
        biased=False,
        theta=1000.0,
        eps=1e-12,
        pools=True,
        mlp=_gated_mlp,
        head=pooler_head,
    )
    return build_rotary_bert(scope, config, kind)


def build_rotary_bert(scope: Scope, config: ConfigReader, kind: RotaryBert) -> Encoder:
    """The encoder with its tensors under `kind.prefix` unless the checkpoint is bare."""
    sizes = read_encoder_sizes(config, eps=kind.eps)
    rope = kind.rope or read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=kind.theta,
    )
    inside = scope if scope.head.bare else scope / kind.prefix
    embeddings = BertEmbeddings(
        inside / "embeddings", sizes, config, norm=inside / kind.embedding_norm, first_position=None
    )
    pooled = kind.pools and scope.head.kind == "sequence"
    return Encoder(
        scope,
        sizes,
        embed=embeddings.embed,
        layers=[
            _layer(inside / kind.layers / str(i), sizes, kind, rope) for i in range(sizes.layers)
        ],
        norm=None,
        classifier=kind.head(scope, inside, sizes.width),
        ignored=IGNORED if pooled else (*IGNORED, POOLER),
        segments=embeddings.num_types > 1,
    )


def _layer(scope: Scope, sizes: EncoderSizes, kind: RotaryBert, rope: RopeSpec) -> EncoderLayer:
    return EncoderLayer(
        attention=SpanAttentionLayer(
            scope / kind.attention,
            sizes,
            names=(kind.merged,),
            out=kind.out,
            bias=kind.biased,
            rope=rope,
        ),
        after_attention=LayerNorm(scope / kind.norms[0], sizes.width, eps=sizes.eps),
        mlp=kind.mlp(scope / "mlp", sizes),
        after_mlp=LayerNorm(scope / kind.norms[1], sizes.width, eps=sizes.eps),
    )


def _gated_mlp(scope: Scope, sizes: EncoderSizes) -> GatedMLP:
    return GatedMLP(scope, sizes.feed_forward, names=_GATE_UP_DOWN)

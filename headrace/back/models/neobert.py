"""NeoBERT (Le Breton et al. 2025): pre-norms by the root mean square, rotations of neighbours and
gated MLPs, query, key and value in one tensor head by head (names and keys of the published
checkpoint)."""

from __future__ import annotations

from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

IGNORED = (r"decoder\..*", r"(.*\.)?freqs_cis")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """NeoBERT, NeoBERTLMHead, NeoBERTForSequenceClassification, whose sizes stand under common keys
    besides (published_keys.py)."""
    for key, kept in (("rms_norm", True), ("rope", True), ("ngpt", False)):
        if config.bool(key, kept) != kept:
            raise config.wrong(key, str(kept).lower())
    config.choice("hidden_act", ("swiglu",), "swiglu")
    plain = ConfigReader({**config.raw, "hidden_act": "silu"}, config.where)
    sizes = read_encoder_sizes(plain, eps=1e-6)
    inside = scope if scope.head.bare else scope / "model"
    words = TokenEmbedding(inside / "encoder", sizes.vocabulary, sizes.width)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, layout="pairs"
    )
    layers = [
        _layer(inside / "transformer_encoder" / str(i), sizes, rope) for i in range(sizes.layers)
    ]
    return Encoder(
        scope,
        sizes,
        embed=lambda batch: words.lookup(batch.token_ids_T),
        layers=layers,
        norm=RMS.build(inside / "layer_norm", sizes.width, eps=sizes.eps),
        classifier=_head(scope, sizes.width),
        ignored=IGNORED,
    )


def _layer(scope: Scope, sizes: EncoderSizes, rope: RopeSpec) -> EncoderLayer:
    attention = SpanAttentionLayer(
        scope, sizes, names=("qkv",), by_head=True, out="wo", bias=False, rope=rope
    )
    return EncoderLayer(
        before_attention=RMS.build(scope / "attention_norm", sizes.width, eps=sizes.eps),
        attention=attention,
        before_mlp=RMS.build(scope / "ffn_norm", sizes.width, eps=sizes.eps),
        mlp=GatedMLP(scope / "ffn", sizes.feed_forward, merged="w12", names=("gate", "up", "w3")),
    )


def _head(scope: Scope, width: int) -> Classifier | None:
    head = scope.head
    if head.kind == "none":
        return None
    last = Dense(scope / "classifier", width, head.num_labels, bias=True)
    return Classifier(last, first=Dense(scope / "dense", width, width, bias=True))

"""ModernBERT (Warner et al. 2024): norms before each branch, rotary positions, gated MLPs, and two
of three layers that see 64 tokens on each side only."""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense
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
from headrace.base.config.hf import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"
IGNORED = (r"decoder\..*",)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """ModernBertModel, ModernBertForSequenceClassification, ModernBertForTokenClassification,
    ModernBertForMaskedLM."""
    return modernbert_encoder(scope, scope if scope.head.bare else scope / "model", config)


def modernbert_encoder(scope: Scope, inside: Scope, config: ConfigReader) -> Encoder:
    """`scope` is that of the head, `inside` that of all else."""
    sizes = read_encoder_sizes(
        config, eps=1e-5, activation_key="hidden_activation", eps_key="norm_eps"
    )
    norm_bias = config.bool("norm_bias", False)
    embeddings = inside / "embeddings"
    words = TokenEmbedding(embeddings / "tok_embeddings", sizes.vocabulary, sizes.width)
    first = LayerNorm(embeddings / "norm", sizes.width, eps=sizes.eps, bias=norm_bias)

    def embed(batch: Batch) -> torch.Tensor:
        x_TE = words.lookup(batch.token_ids_T)
        if batch.encoded is not None:
            x_TE = batch.encoded.put(x_TE)
        return first.norm(x_TE)

    types = modernbert_layer_types(config, sizes.layers)
    layers = [
        _layer(inside / "layers" / str(i), sizes, config, kind, first=i == 0)
        for i, kind in enumerate(types)
    ]
    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=layers,
        norm=LayerNorm(inside / "final_norm", sizes.width, eps=sizes.eps, bias=norm_bias),
        classifier=_head(scope, sizes, config),
        ignored=(*IGNORED, r"head\..*") if scope.head.kind == "none" else IGNORED,
    )


def _layer(
    scope: Scope, sizes: EncoderSizes, config: ConfigReader, kind: str, *, first: bool
) -> EncoderLayer:
    norm_bias = config.bool("norm_bias", False)
    half = config.int("local_attention", 128, ge=2) // 2

    def norm(name: str) -> LayerNorm:
        return LayerNorm(scope / name, sizes.width, eps=sizes.eps, bias=norm_bias)

    return EncoderLayer(
        before_attention=None if first else norm("attn_norm"),
        attention=SpanAttentionLayer(
            scope / "attn",
            sizes,
            names=("Wqkv",),
            out="Wo",
            bias=config.bool("attention_bias", False),
            rope=modernbert_rope(config, sizes.head_dim, kind, scope.max_positions),
            window=half if kind == SLIDING else None,
        ),
        before_mlp=norm("mlp_norm"),
        mlp=GatedMLP(
            scope / "mlp",
            sizes.feed_forward,
            bias=config.bool("mlp_bias", False),
            merged="Wi",
            names=("", "", "Wo"),
        ),
    )


def modernbert_layer_types(config: ConfigReader, layers: int) -> tuple[str, ...]:
    """As listed, or every n-th layer full."""
    types = config.list("layer_types", None, of=str)
    if types is None:
        every = config.int("global_attn_every_n_layers", 3, ge=1)
        return tuple(SLIDING if i % every else FULL for i in range(layers))
    if len(types) != layers or not set(types) <= {FULL, SLIDING}:
        raise config.wrong("layer_types", f"{layers} of {FULL}, {SLIDING}")
    return tuple(types)


def modernbert_rope(config: ConfigReader, head_dim: int, kind: str, max_positions: int) -> RopeSpec:
    """`rope_parameters` per layer type, or the two older keys."""
    if "rope_parameters" in config:
        return read_rope(config, head_dim=head_dim, max_positions=max_positions, layer_type=kind)
    key, default = (
        ("global_rope_theta", 160_000.0) if kind == FULL else ("local_rope_theta", 10_000.0)
    )
    theta = config.float(key, default, ge=1.0)
    return read_rope(config, head_dim=head_dim, max_positions=max_positions, theta=theta)


def _head(scope: Scope, sizes: EncoderSizes, config: ConfigReader) -> Classifier | None:
    head = scope.head
    if head.kind == "none":
        return None
    norm_bias = config.bool("norm_bias", False)
    return Classifier(
        Dense(scope / "classifier", sizes.width, head.num_labels, bias=True),
        first=Dense(
            scope / "head" / "dense",
            sizes.width,
            sizes.width,
            bias=config.bool("classifier_bias", False),
        ),
        activation=config.choice("classifier_activation", ("gelu", "silu", "relu", "tanh"), "gelu"),
        norm=LayerNorm(scope / "head" / "norm", sizes.width, eps=sizes.eps, bias=norm_bias),
    )

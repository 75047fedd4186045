"""UltraBERT (2026): EuroBERT's layers, of which two of three see a window on each side and have a
rope of their own."""

from __future__ import annotations

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import Encoder, read_encoder_sizes
from headrace.back.models.eurobert import both_sides_layer
from headrace.back.models.modernbert import FULL, SLIDING
from headrace.base.config.hf import ConfigReader

BASES = {SLIDING: 10_000.0, FULL: 2_560_000.0}
IGNORED = (r"head\..*", r"cls\..*")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """UltrabertModel, UltrabertForSequenceClassification, UltrabertForTokenClassification,
    UltrabertForMaskedLM."""
    inside = scope if scope.head.bare else scope / "ultrabert"
    sizes = read_encoder_sizes(config, eps=1e-6, eps_key="rms_norm_eps", default_activation="silu")
    words = TokenEmbedding(inside / "embed_tokens", sizes.vocabulary, sizes.width)
    window = config.int("sliding_window", 128, ge=1)
    kinds = _layer_types(config, sizes.layers)
    ropes = {
        kind: read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            layer_type=kind,
            default_theta=BASES[kind],
        )
        for kind in dict.fromkeys(kinds)
    }

    def embed(batch: Batch) -> torch.Tensor:
        return words.lookup(batch.token_ids_T)

    layers = [
        both_sides_layer(
            inside / "layers" / str(i),
            sizes,
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            bias=config.bool("attention_bias", False),
            mlp_bias=config.bool("mlp_bias", False),
        )
        for i, kind in enumerate(kinds)
    ]
    head, classifier = scope.head, None
    if head.kind != "none":
        last = Dense(scope / "classifier", sizes.width, head.num_labels, bias=True)
        classifier = Classifier(last)
    return Encoder(
        scope,
        sizes,
        embed=embed,
        layers=layers,
        norm=RMS.build(inside / "norm", sizes.width, eps=sizes.eps),
        classifier=classifier,
        ignored=IGNORED,
    )


def _layer_types(config: ConfigReader, layers: int) -> tuple[str, ...]:
    """As listed, or every third full."""
    default = [SLIDING if (i + 1) % 3 else FULL for i in range(layers)]
    types = config.list("layer_types", default, of=str, length=layers)
    if not set(types) <= {FULL, SLIDING}:
        raise config.wrong("layer_types", f"{layers} of {FULL}, {SLIDING}")
    return tuple(types)

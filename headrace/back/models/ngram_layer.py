"""A decoder's first layer behind n-grams (layers/hashed_ngrams.py): they need the tokens before a
step's own, and so a cache, which layers have.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.hashed_ngrams import HashedNGrams, HashedNGramSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import (
    DecoderLayerSpec,
    DecoderSizes,
    Layer,
    LayerAround,
    Stream,
)


@dataclass(frozen=True, kw_only=True)
class NGramLayerSpec:
    """`layer`, whose residual is what `ngrams` make of the embeddings; `name`: their module."""

    layer: DecoderLayerSpec
    ngrams: HashedNGramSpec
    name: str = "ngram_embeddings"

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> NGramLayer:
        """See DecoderLayerSpec."""
        layer = self.layer.build(scope, cache, sizes, norms)
        own = cache + len(layer.kv_forms)
        return NGramLayer(layer, HashedNGrams(scope / self.name, own, self.ngrams, sizes.width))


class NGramLayer(LayerAround):
    """See NGramLayerSpec."""

    def __init__(self, layer: Layer, ngrams: HashedNGrams) -> None:
        super().__init__(layer)
        self._ngrams = ngrams

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The layer's, and that of the tokens."""
        return (*super().kv_forms, self._ngrams.kv_form)

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = stream
        return self._layer.forward(
            (branch_TE, self._ngrams.into(residual_TE, batch)), batch, last=last
        )

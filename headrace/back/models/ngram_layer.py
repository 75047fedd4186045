"""A decoder's first layer behind n-grams (layers/hashed_ngrams.py): they need the tokens before a
step's own, and so a cache, which layers have.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.hashed_ngrams import HashedNGrams, HashedNGramSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.mixer import Mixer
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderLayerSpec, DecoderSizes, Layer, Stream


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


class NGramLayer:
    """See NGramLayerSpec."""

    def __init__(self, layer: Layer, ngrams: HashedNGrams) -> None:
        self._layer, self._ngrams = layer, ngrams

    @property
    def mixer(self) -> Mixer[Any] | None:
        """See Layer."""
        return self._layer.mixer

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The layer's, and that of the tokens."""
        return (*self._layer.kv_forms, self._ngrams.kv_form)

    @property
    def tail(self) -> Tail | None:
        """See Layer."""
        return self._layer.tail

    @property
    def takes_adapters(self) -> bool:
        """See Layer."""
        return self._layer.takes_adapters

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = stream
        return self._layer.forward(
            (branch_TE, self._ngrams.into(residual_TE, batch)), batch, last=last
        )

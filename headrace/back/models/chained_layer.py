"""A layer of the checkpoint that is several layers of ours, one after another: of mixers alone,
where both branches of a layer mix the tokens of a row."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderLayer, DecoderSizes, LayerSpec, Stream


@dataclass(frozen=True, kw_only=True)
class ChainedSpec:
    """`parts`: in order; each writes a cache."""

    parts: tuple[LayerSpec, ...]

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> ChainedLayer:
        """See DecoderLayerSpec."""
        return ChainedLayer(scope, cache, self, sizes, norms)


class ChainedLayer:
    """See ChainedSpec and Layer."""

    mixer: DecoderLayer | None = None
    tail: Tail | None = None
    takes_adapters = True

    def __init__(
        self, scope: Scope, cache: int, spec: ChainedSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        self._parts: list[DecoderLayer] = []
        self.kv_forms: tuple[CacheForm, ...] = ()
        for part in spec.parts:
            self._parts.append(part.build(scope, cache + len(self.kv_forms), sizes, norms))
            self.kv_forms += self._parts[-1].kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        for part in self._parts:
            stream = part.forward(stream, batch, last=last and part is self._parts[-1])
        return stream

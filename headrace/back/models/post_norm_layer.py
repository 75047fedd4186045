"""A decoder layer with a norm behind each sum of a branch and the residual, which then is what it
gives (Vaswani et al. 2017, section 3.1). T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.attention.plan import Batch
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import add_norm
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream, handed_on


@dataclass(frozen=True, kw_only=True)
class PostNormLayerSpec:
    """One layer as data of its decoder. `norms` name those behind its two sums."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norms: tuple[str, str]

    def build(
        self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec
    ) -> PostNormLayer:
        """See DecoderLayerSpec."""
        return PostNormLayer(scope, cache, self, sizes, norms)


class PostNormLayer:
    """See Layer."""

    takes_adapters = True
    tail: Tail | None = None

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: PostNormLayerSpec,
        sizes: DecoderSizes,
        norms: NormSpec,
    ) -> None:
        self._norms = [norms.build(scope / name, sizes.width, eps=sizes.eps) for name in spec.norms]
        self.mixer = spec.mixer.build(scope, cache)
        place = FeedForwardPlace(width=sizes.width, inner=sizes.inner, activation=sizes.activation)
        self._feed_forward = spec.feed_forward.build(scope, place)
        self._adapters = scope.adapters
        self.kv_forms = self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer. It leaves no branch."""
        residual_TE = add_norm(None, *stream)
        handed, residual_TE, batch = handed_on(
            self.mixer, residual_TE, residual_TE, batch, self._adapters, last=last
        )
        branch_TE = self.mixer.attend_into(handed, residual_TE, batch)
        residual_TE = add_norm(self._norms[0], branch_TE, residual_TE)
        branch_TE = self._feed_forward.forward_into(residual_TE, residual_TE)
        return None, add_norm(self._norms[1], branch_TE, residual_TE)

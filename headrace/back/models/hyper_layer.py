"""A decoder layer whose residual is several streams: each branch reads one that is made of them,
and is added to all (layers/hyper_connections.py, layers/gated_streams.py). T tokens, E hidden size,
S streams, N tokens whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import Branch
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.moe.hashed import HashedMixtureSpec
from headrace.back.layers.norm import PRE, BlockNorm, NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.streams import ConnectedStreamsSpec, StreamInputsSpec
from headrace.back.models.decoder_layer import DecoderSizes, Stream
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class HyperLayerSpec:
    """One layer. `normed`: a norm stands before each branch. `of_tokens`: in place of the
    feed-forward, experts that the tokens themselves choose. `ngrams`: added to the streams before
    the layer."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec | None
    streams: ConnectedStreamsSpec
    of_tokens: HashedMixtureSpec | None = None
    ngrams: StreamInputsSpec | None = None
    normed: bool = True

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> HyperLayer:
        """See DecoderLayerSpec."""
        return HyperLayer(scope, cache, self, sizes, norms)


class HyperLayer:
    """See HyperLayerSpec; the residual of its stream is [T, S, E]."""

    takes_adapters = False
    tail: Tail | None = None

    def __init__(
        self, scope: Scope, cache: int, spec: HyperLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        width = sizes.width
        self._norms: list[BlockNorm | None] = [None, None]
        if spec.normed:
            self._norms = [
                norms.build(scope / str(name), width, eps=sizes.eps)
                for name in (PRE.before_attention, PRE.before_mlp)
            ]
        self._around_attention = spec.streams.connect(scope, 0, width)
        self._around_mlp = spec.streams.connect(scope, 1, width)
        self.mixer: Mixer[Any] = spec.mixer.build(scope, cache)
        self._ngrams = spec.ngrams and spec.ngrams.build(
            scope / spec.ngrams.name, cache + len(self.mixer.kv_forms), width
        )
        place = FeedForwardPlace(width=width, inner=sizes.inner, activation=sizes.activation)
        self._mlp = spec.feed_forward and spec.feed_forward.build(scope, place)
        self._of_tokens = spec.of_tokens and spec.of_tokens.build(scope, place)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The caches of its mixer, and of what is before it."""
        forms = self.mixer.kv_forms
        return forms if self._ngrams is None else forms + self._ngrams.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        x_TSE, token_ids_T = stream[1], batch.token_ids_T
        if self._ngrams is not None:
            x_TSE = x_TSE + self._ngrams.of(x_TSE, batch)
        weights, x_TE = self._around_attention.collapse(x_TSE)
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(_normed(self._norms[0], x_TE), batch, at_N)
        if after is not None and at_N is not None:
            x_TSE, x_TE = x_TSE.index_select(0, at_N), x_TE.index_select(0, at_N)
            weights, batch = weights.at(at_N), after
            token_ids_T = token_ids_T.index_select(0, at_N)
        y_TE = _whole(self.mixer.attend_into(handed, x_TE, batch))
        x_TSE = self._around_attention.expand(weights, y_TE, x_TSE)
        weights, x_TE = self._around_mlp.collapse(x_TSE)
        y_TE = self._fed_forward(_normed(self._norms[1], x_TE), token_ids_T)
        return None, self._around_mlp.expand(weights, y_TE, x_TSE)

    def _fed_forward(self, x_TE: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        if self._of_tokens is not None:
            return self._of_tokens.forward_tokens(x_TE, token_ids_T)
        assert self._mlp is not None, "a layer has one of both"
        return _whole(self._mlp.forward_into(x_TE, x_TE))


def _normed(norm: BlockNorm | None, x_TE: torch.Tensor) -> torch.Tensor:
    return x_TE if norm is None else norm.norm(x_TE)


def _whole(branch_TE: Branch) -> torch.Tensor:
    """What a branch gives, summed over the ranks."""
    assert branch_TE is not None, "a branch that does not add gives its sum"
    return branch_TE.total() if isinstance(branch_TE, Partial) else branch_TE

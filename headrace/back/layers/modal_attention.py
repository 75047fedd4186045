"""Attention and MLP with weights of their own for tokens of images (Wang et al. 2023, CogVLM): all
tokens attend to each other, but what is projected, and by what, follows from a token's kind.

Which tokens are images' is asked in steps alone that reach a prompt's media: what is generated is
text. T tokens, N of them that a last layer goes on with, M of images, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.plan import Batch, EncodedTokens
from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.attended import Queries
from headrace.back.layers.attention import Attention, AttentionSpec
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import FeedForwardPlace, GatedMLP
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part

Split = tuple[torch.Tensor, torch.Tensor] | None
"""Indices int64 of text's tokens and of images'; None: all are text's."""


class TokenKinds:
    """Which tokens of a step are images', for all layers. `all`: of its T, `rest`: of those that
    the layer goes on with behind its attention. `end_E`: the row of the token that ends an input,
    which counts as text."""

    def __init__(self) -> None:
        self.end_E = torch.empty(0)
        self.all: Split = None
        self.rest: Split = None
        self._is_media_T = torch.empty(0)

    def see(self, batch: Batch) -> None:
        """In front of the first layer."""
        self.all = self.rest = None
        encoded = batch.encoded
        if encoded is None:
            return
        assert isinstance(encoded, EncodedTokens), "such steps are not recorded"
        shown = (encoded.rows_ME != self.end_E).any(1)
        self._is_media_T = torch.zeros_like(batch.token_ids_T, dtype=torch.bool)
        self._is_media_T[encoded.at_M] = shown
        self.all = self.rest = _split(self._is_media_T)

    def go_on(self, at_N: torch.Tensor) -> None:
        """The layer goes on with these."""
        if self.all is not None:
            self.rest = _split(self._is_media_T.index_select(0, at_N))


def _split(is_media_T: torch.Tensor) -> Split:
    return (~is_media_T).nonzero()[:, 0], is_media_T.nonzero()[:, 0]


def by_kind(x_TI: torch.Tensor, split: Split, text: Linear, media: Linear) -> torch.Tensor:
    """y_TO: each token by the weights of its kind."""
    if split is None:
        return text(x_TI)
    parts = [
        (at, project(x_TI.index_select(0, at)))
        for at, project in zip(split, (text, media), strict=True)
        if at.numel()
    ]
    y_TO = x_TI.new_empty(x_TI.shape[0], parts[0][1].shape[1])
    for at, part in parts:
        y_TO.index_copy_(0, at, part)
    return y_TO


@dataclass(frozen=True, kw_only=True)
class ModalAttentionSpec(AttentionSpec):
    """`names`: of text's tensors; `media_names`: of those of images that hold query, key and value,
    and lead back. `media_bias`: of the former."""

    kinds: TokenKinds
    media_names: tuple[str, str]
    media_bias: bool = False

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> ModalAttention:
        """See AttentionSpec; it neither norms nor adds."""
        return ModalAttention(scope, cache, self)


class ModalAttention(Attention):
    """x_TE -> y_TE by ModalAttentionSpec."""

    def __init__(self, scope: Scope, layer: int, spec: ModalAttentionSpec) -> None:
        super().__init__(scope, layer, spec)
        merged, out = spec.media_names
        inside = scope / spec.names.module
        self._kinds = spec.kinds
        self._now: Split = None
        self._media_qkv = ColumnLinear(
            inside, spec.width, spec.parts, bias=spec.media_bias, merged=merged
        )
        values = Part(out, spec.heads * spec.head_dim, spec.heads)
        self._media_out = RowLinear(inside / out, values, spec.width)
        scope.on_finish(self._join)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> Queries:
        """See Attention."""
        self._now = self._kinds.all
        return super().queries(x_TE, batch, at_N)

    def attend_into(
        self, queries: Queries, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """See Attention."""
        self._now = self._kinds.rest
        return super().attend_into(queries, residual_TE, batch)

    def _join(self) -> None:
        self._qkv.project = self._either(self._qkv.project, self._media_qkv.project)
        self._out.project = self._either(self._out.project, self._media_out.project)

    def _either(self, text: Linear, media: Linear) -> Linear:
        return lambda x_TI: by_kind(x_TI, self._now, text, media)


@dataclass(frozen=True, kw_only=True)
class ModalMLPSpec:
    """Gated MLPs of text and of images, by these names."""

    kinds: TokenKinds
    names: tuple[str, str]

    def build(self, scope: Scope, place: FeedForwardPlace) -> ModalMLP:
        """See FeedForwardSpec."""
        return ModalMLP(scope, self, replace(place, norm=None, adds=False))


class ModalMLP:
    """x_TE -> y_TE by ModalMLPSpec."""

    norms = False

    def __init__(self, scope: Scope, spec: ModalMLPSpec, place: FeedForwardPlace) -> None:
        self._kinds = spec.kinds
        self._text, self._media = (GatedMLP(scope / name, place) for name in spec.names)

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """y_TE, to be added to the residual."""
        return by_kind(x_TE, self._kinds.rest, self._text.forward, self._media.forward)

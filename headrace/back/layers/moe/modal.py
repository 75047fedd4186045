"""Experts by modality: tokens of images and video have a router and experts of their own, and all
tokens share an MLP (Baidu 2025, ERNIE 4.5, section 2.1).

Which tokens are images' is asked in steps alone that reach a prompt's media: what is generated is
text. T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.mlp import FeedForward, FeedForwardPlace, GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class ModalMixtureSpec:
    """`shared`: the MLP of all tokens. `media_ids`: tokens of images and video, and of the marks
    around them."""

    text: MixtureSpec
    media: MixtureSpec
    shared: GatedMLPSpec | None
    media_ids: tuple[int, ...]

    def build(self, scope: Scope, place: FeedForwardPlace) -> ModalMixture:
        """See FeedForwardSpec."""
        return ModalMixture(scope, self, replace(place, norm=None))


class ModalMixture:
    """x_TE -> y_TE by ModalMixtureSpec."""

    norms = False

    def __init__(self, scope: Scope, spec: ModalMixtureSpec, place: FeedForwardPlace) -> None:
        inside = replace(place, adds=True)
        self._adds, self._ids = place.adds, torch.tensor(spec.media_ids, device=scope.device)
        self._text, self._media = spec.text.build(scope, inside), spec.media.build(scope, inside)
        self._shared = spec.shared and spec.shared.build(scope, inside)
        self._is_media_T: torch.Tensor | None = None
        # Each router sees some tokens alone, so that its choices cannot be told by token.
        scope.on_finish(scope.ledger.routing.top_k.clear)

    def look(self, batch: Batch, at_N: torch.Tensor | None) -> None:
        """Sees which tokens of the step are images'; `at_N`: those that are left."""
        self._is_media_T = None
        if batch.media_T is None:
            return
        is_media_T = torch.isin(batch.token_ids_T, self._ids) & batch.media_T
        self._is_media_T = is_media_T if at_N is None else is_media_T.index_select(0, at_N)

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor | Partial:
        """y_TE, to be added to the residual."""
        total = self._share(self._shared, x_TE)
        if self._is_media_T is None:
            parts = ((self._text, None),)
        else:
            is_media_T = self._is_media_T
            parts = (
                (self._text, (~is_media_T).nonzero()[:, 0]),
                (self._media, is_media_T.nonzero()[:, 0]),
            )
        y_TE, axis = torch.zeros_like(x_TE), None
        for experts, at in parts:
            if at is not None and not at.numel():
                continue
            one = experts.forward_into(x_TE if at is None else x_TE.index_select(0, at), y_TE)
            assert one is not None
            axis = one.axis if isinstance(one, Partial) else None
            share = one.share if isinstance(one, Partial) else one
            y_TE = share if at is None else y_TE.index_copy_(0, at, share)
        y_TE = y_TE if total is None else y_TE + total
        if axis is None:
            return y_TE
        partial = Partial(y_TE, axis)
        return partial if self._adds else partial.total()

    @staticmethod
    def _share(mlp: FeedForward | None, x_TE: torch.Tensor) -> torch.Tensor | None:
        """This rank's share of an MLP's y_TE."""
        if mlp is None:
            return None
        y_TE = torch.zeros_like(x_TE)
        one = mlp.forward_into(x_TE, y_TE)
        if one is None:
            return y_TE
        return one.share if isinstance(one, Partial) else one

"""Experts over a latent: a token is projected down, its experts compute there, and the sum is
projected back; the router reads the token itself (Nemotron 3). There may be a norm before the way
back (Kimi K3), or behind the way down (Muse Spark).

T tokens, E hidden size, L latent size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.mlp import FeedForwardPlace
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec
from headrace.back.layers.norm import NormSpec, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part

PROJECTIONS = ("fc1_latent_proj", "fc2_latent_proj")


@dataclass(frozen=True, kw_only=True)
class LatentMixtureSpec:
    """`latent`: L; `bias`: of the two projections, which lie in the mixture's module under these
    `names`; `norm`: the name and the epsilon of a norm of the sum, before it is projected back;
    `first_norm`: the name and the kind of one of what goes into the experts. The mixture has no
    shared experts."""

    mixture: MixtureSpec
    latent: int
    bias: bool = False
    names: tuple[str, str] = PROJECTIONS
    norm: tuple[str, float] | None = None
    first_norm: tuple[str, NormSpec] | None = None

    def build(self, scope: Scope, place: FeedForwardPlace) -> LatentMixture:
        """See FeedForwardSpec."""
        return LatentMixture(scope, self, place)


class LatentMixture:
    """x_TE -> y_TE: see LatentMixtureSpec."""

    norms = False

    def __init__(self, scope: Scope, spec: LatentMixtureSpec, place: FeedForwardPlace) -> None:
        mixture, width = spec.mixture, place.width
        assert mixture.shared is None, "shared experts read the token, not its latent"
        self._scope, self._adds = scope, place.adds
        at = scope / mixture.name
        self._mixture = Mixture(
            at,
            mixture,
            spec.latent,
            activation=mixture.activation or place.activation,
            routed_width=width,
        )
        down, up = spec.names
        self._down = ColumnLinear(at, width, (Part(down, spec.latent, 1),), bias=spec.bias)
        self._first_norm = None
        if spec.first_norm is not None:
            name, kind = spec.first_norm
            self._first_norm = kind.build(at / name, spec.latent, eps=0.0)
        self._norm: RMSNorm | None = None
        if spec.norm is not None:
            name, eps = spec.norm
            self._norm = RMSNorm(at / name, spec.latent, eps=eps)
        self._up: Linear = not_loaded
        self._up_weight = at.param(f"{up}.weight", (width, spec.latent))
        self._up_bias = at.param(f"{up}.bias", (width,), init="zeros") if spec.bias else None
        scope.on_finish(self._finish)

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor | Partial:
        """y_TE, to be added to the residual."""
        axis = self._scope.mesh.tp
        latent_TL = self._down.project(x_TE)
        if self._first_norm is not None:
            latent_TL = self._first_norm.norm(latent_TL)
        latent_TL = self._mixture.mixed(latent_TL, x_TE)
        if self._norm is not None:
            latent_TL = latent_TL if axis.size == 1 else Partial(latent_TL, axis).total()
            latent_TL = self._norm.norm(latent_TL)
        share_TE = self._up(latent_TL)
        if axis.size == 1:
            return share_TE
        if self._norm is not None and axis.rank:
            share_TE.zero_()  # each rank has the whole of it, and the ranks' results are added up
        share = Partial(share_TE, axis)
        return share if self._adds else share.total()

    def _finish(self) -> None:
        bias = None if self._up_bias is None else self._up_bias.take()
        if bias is not None and self._scope.mesh.tp.rank:
            bias.zero_()  # the ranks' results are added up
        self._up = bind_linear(self._scope, self._up_weight.take(), bias)

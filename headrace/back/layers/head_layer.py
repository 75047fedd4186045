"""The last norm of a decoder with a layer behind it, before the output head:
norm(act(dense(norm(x)))) (ModernBERT's decoders).

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class HeadLayerSpec:
    """A kind of last norm, as NormSpec. `norms`: both norms; `at`: where the layer lies, with
    "dense" and "norm" below it; `bias`: of its GEMM."""

    norms: NormSpec
    at: Scope
    activation: str
    bias: bool = False

    def build(self, scope: Scope, width: int, *, eps: float) -> HeadLayer:
        """`scope` is that of the norm before it."""
        return HeadLayer(scope, self, width, eps=eps)


class HeadLayer:
    """x_TE -> y_TE; `add_norm` and `sum_norm` as of RMSNorm."""

    fusible = None
    """No GEMM does it."""

    def __init__(self, scope: Scope, spec: HeadLayerSpec, width: int, *, eps: float) -> None:
        self._before = spec.norms.build(scope, width, eps=eps)
        self._dense = WholeLinear(spec.at / "dense", width, width, bias=spec.bias)
        self._activation = ElementwiseActivation(spec.at, spec.activation)
        self._behind = spec.norms.build(spec.at / "norm", width, eps=eps)

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        return self._layer(self._before.norm(x_TE))

    def add_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds x into the residual first."""
        return self._layer(self._before.add_norm(x_TE, residual_TE))

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds the sum of the ranks' shares into the residual first."""
        return self._layer(self._before.sum_norm(partial, residual_TE))

    def _layer(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self._behind.norm(self._activation.apply(self._dense.project(x_TE)))

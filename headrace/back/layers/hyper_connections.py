"""Hyper-connections (Zhu et al. 2024): a residual of several streams. What a branch reads is a
weighted sum of them, what it gives is added to each with a weight; the weights come from the
streams themselves. With `iterations` the streams are also mixed by a matrix whose rows and columns
Sinkhorn and Knopp's rule makes sum to 1 (Xie et al. 2026, "mHC"; DeepSeek V4).

Weights are computed in float32: they are few. T tokens, E hidden size, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from headrace.back.layers.scope import Scope


@dataclass(frozen=True, kw_only=True)
class HyperSpec:
    """`streams`: S. `eps` is added to weights behind their sigmoid, to those of results if
    `results_eps` says so; `norm_eps`: of the norm of all streams together; `magnitude`: the largest
    weight of a result; `iterations` of the mixture's rule, 0: streams are not mixed."""

    streams: int
    eps: float
    norm_eps: float
    magnitude: float = 2.0
    results_eps: bool = False
    iterations: int = 0

    @property
    def outputs(self) -> int:
        """Numbers of a token: weights of inputs, of results, and of the mixture."""
        return self.streams * (2 + (self.streams if self.iterations else 0))

    def build(self, scope: Scope, width: int) -> HyperHead:
        """The streams' begin and end; `scope` is that of the embedding. See ResidualStreamsSpec."""
        return HyperHead(scope / "hc_head", self, width)


class HyperWeights(NamedTuple):
    """Of one branch: what its result is added with, and the streams' mixture."""

    result_TS: torch.Tensor
    mixture_TSS: torch.Tensor | None

    def at(self, at_N: torch.Tensor) -> HyperWeights:
        """Those of the tokens `at_N`."""
        mixture = None if self.mixture_TSS is None else self.mixture_TSS.index_select(0, at_N)
        return HyperWeights(self.result_TS.index_select(0, at_N), mixture)


class HyperConnection:
    """Around one branch; `scope` is its own."""

    def __init__(self, scope: Scope, spec: HyperSpec, width: int) -> None:
        self._spec = spec
        inputs, wide = spec.streams * width, torch.float32
        self._params = [
            scope.param("fn", (spec.outputs, inputs), dtype=wide),
            scope.param("base", (spec.outputs,), init="zeros", dtype=wide),
            scope.param("scale", (3 if spec.iterations else 2,), init="ones", dtype=wide),
        ]
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def collapse(self, x_TSE: torch.Tensor) -> tuple[HyperWeights, torch.Tensor]:
        """The weights of these streams, and what the branch reads, x_TE."""
        (fn, base, scale), spec = self._weights, self._spec
        sizes = [spec.streams] * 2 + ([spec.streams**2] if spec.iterations else [])
        raw_TX = _projected(x_TSE, fn, spec.norm_eps)
        input_TS, result_TS, *mixture = (
            part_TX * scale[i] + bias_X
            for i, (part_TX, bias_X) in enumerate(
                zip(raw_TX.split_with_sizes(sizes, dim=1), base.split(sizes), strict=True)
            )
        )
        x_TE = _summed(x_TSE, input_TS.sigmoid() + spec.eps)
        result_TS = spec.magnitude * result_TS.sigmoid() + (spec.eps if spec.results_eps else 0.0)
        mixture_TSS = self._mixture(mixture[0]) if mixture else None
        return HyperWeights(result_TS, mixture_TSS), x_TE

    def expand(
        self, weights: HyperWeights, y_TE: torch.Tensor, x_TSE: torch.Tensor
    ) -> torch.Tensor:
        """The streams behind the branch that gave y_TE."""
        wide_TSE = x_TSE.float()
        if weights.mixture_TSS is not None:
            wide_TSE = torch.bmm(weights.mixture_TSS.transpose(1, 2), wide_TSE)
        added_TSE = weights.result_TS[:, :, None] * y_TE.float()[:, None]
        return (added_TSE + wide_TSE).to(x_TSE.dtype)

    def _mixture(self, raw_TZ: torch.Tensor) -> torch.Tensor:
        eps = self._spec.eps
        share_TSS = raw_TZ.unflatten(1, (self._spec.streams, -1)).softmax(-1) + eps
        share_TSS = share_TSS / (share_TSS.sum(-2, keepdim=True) + eps)
        for _ in range(self._spec.iterations - 1):
            share_TSS = share_TSS / (share_TSS.sum(-1, keepdim=True) + eps)
            share_TSS = share_TSS / (share_TSS.sum(-2, keepdim=True) + eps)
        return share_TSS

    def _finish(self) -> None:
        self._weights = [param.take().float() for param in self._params]


class HyperHead:
    """See ResidualStreams: all streams begin alike and end as one weighted sum."""

    def __init__(self, scope: Scope, spec: HyperSpec, width: int) -> None:
        self._spec = spec
        streams, wide = spec.streams, torch.float32
        self._params = [
            scope.param("hc_fn", (streams, streams * width), dtype=wide),
            scope.param("hc_base", (streams,), init="zeros", dtype=wide),
            scope.param("hc_scale", (1,), init="ones", dtype=wide),
        ]
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """x_TSE of the tokens' embeddings."""
        return x_TE[:, None].repeat(1, self._spec.streams, 1)

    def end(self, x_TSE: torch.Tensor) -> torch.Tensor:
        """x_TE behind the last layer."""
        fn, base, scale = self._weights
        raw_TS = _projected(x_TSE, fn, self._spec.norm_eps) * scale + base
        return _summed(x_TSE, raw_TS.sigmoid() + self._spec.eps)

    def _finish(self) -> None:
        self._weights = [param.take().float() for param in self._params]


def _projected(x_TSE: torch.Tensor, weight_XI: torch.Tensor, eps: float) -> torch.Tensor:
    """A linear map of all streams of a token, normed together."""
    flat_TI = x_TSE.flatten(1).float()
    scale_T1 = torch.rsqrt(flat_TI.square().mean(1, keepdim=True) + eps)
    return F.linear(flat_TI, weight_XI) * scale_T1


def _summed(x_TSE: torch.Tensor, weight_TS: torch.Tensor) -> torch.Tensor:
    return (x_TSE.float() * weight_TS[:, :, None]).sum(1).to(x_TSE.dtype)

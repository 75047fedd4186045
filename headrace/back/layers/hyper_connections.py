"""Hyper-connections (Zhu et al. 2024): a residual of several streams. What a branch reads is a
weighted sum of them, what it gives is added to each with a weight; the weights come from the
streams themselves. With `iterations` the streams are also mixed by a matrix whose rows and columns
Sinkhorn and Knopp's rule makes sum to 1 (Xie et al. 2026, "mHC"; DeepSeek V4).

Weights are computed in float32: they are few. T tokens, E hidden size, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.norm import RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.streams import StreamWeights, expanded, summed

NAMES = ("attn_hc", "ffn_hc")


@dataclass(frozen=True, kw_only=True)
class HyperSpec:
    """`streams`: S. `eps` is added to weights behind their sigmoid, to those of results if
    `results_eps` says so; `norm_eps`: of the norm of all streams together; `magnitude`: the largest
    weight of a result; `iterations` of the mixture's rule, 0: streams are not mixed. `mean_end`:
    the streams end as their mean."""

    streams: int
    eps: float
    norm_eps: float
    magnitude: float = 2.0
    results_eps: bool = False
    iterations: int = 0
    mean_end: bool = False

    @property
    def outputs(self) -> int:
        """Numbers of a token: weights of inputs, of results, and of the mixture."""
        return self.streams * (2 + (self.streams if self.iterations else 0))

    def connect(self, scope: Scope, branch: int, width: int) -> HyperConnection:
        """See ConnectedStreamsSpec."""
        return HyperConnection(scope / NAMES[branch], self, width)

    def build(self, scope: Scope, width: int) -> HyperHead | MeanHead:
        """The streams' begin and end; `scope` is that of the embedding. See ResidualStreamsSpec."""
        if self.mean_end:
            return MeanHead(self.streams)
        return HyperHead(scope / "hc_head", self, width)


class HyperConnection:
    """Around one branch; `scope` is its own."""

    def __init__(self, scope: Scope, spec: HyperSpec, width: int) -> None:
        self._spec = spec
        inputs, wide = spec.streams * width, torch.float32
        self._projection = StreamProjection(
            scope, "fn", (spec.outputs, inputs), streams=spec.streams, eps=spec.norm_eps
        )
        self._params = [
            scope.param("base", (spec.outputs,), init="zeros", dtype=wide),
            scope.param("scale", (3 if spec.iterations else 2,), init="ones", dtype=wide),
        ]
        self._weights: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def collapse(self, x_TSE: torch.Tensor) -> tuple[StreamWeights, torch.Tensor]:
        """The weights of these streams, and what the branch reads, x_TE."""
        input_TS, weights = self.weights(x_TSE)
        return weights, summed(x_TSE, input_TS)

    def weights(self, x_TSE: torch.Tensor) -> tuple[torch.Tensor, StreamWeights]:
        """What inputs are summed with, input_TS, and the others of these streams."""
        (base, scale), spec = self._weights, self._spec
        sizes = [spec.streams] * 2 + ([spec.streams**2] if spec.iterations else [])
        raw_TX = self._projection.of(x_TSE)
        input_TS, result_TS, *mixture = (
            part_TX * scale[i] + bias_X
            for i, (part_TX, bias_X) in enumerate(
                zip(raw_TX.split_with_sizes(sizes, dim=1), base.split(sizes), strict=True)
            )
        )
        input_TS = self._projection.sigmoid(input_TS) + spec.eps
        result_TS = spec.magnitude * self._projection.sigmoid(result_TS)
        if spec.results_eps:
            result_TS = result_TS + spec.eps
        mixture_TSS = self._mixture(mixture[0]) if mixture else None
        return input_TS, StreamWeights(result_TS, mixture_TSS)

    def expand(
        self, weights: StreamWeights, y_TE: torch.Tensor, x_TSE: torch.Tensor
    ) -> torch.Tensor:
        """The streams behind the branch that gave y_TE."""
        return expanded(weights, y_TE, x_TSE)

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
        shape = (streams, streams * width)
        self._projection = StreamProjection(
            scope, "hc_fn", shape, streams=spec.streams, eps=spec.norm_eps
        )
        self._params = [
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
        base, scale = self._weights
        raw_TS = self._projection.of(x_TSE) * scale + base
        return summed(x_TSE, self._projection.sigmoid(raw_TS) + self._spec.eps)

    def _finish(self) -> None:
        self._weights = [param.take().float() for param in self._params]


class MeanHead:
    """See ResidualStreams: all streams begin alike and end as their mean."""

    def __init__(self, streams: int) -> None:
        self._streams = streams

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """x_TSE of the tokens' embeddings."""
        return x_TE[:, None].repeat(1, self._streams, 1)

    def end(self, x_TSE: torch.Tensor) -> torch.Tensor:
        """x_TE behind the last layer."""
        share_TS = torch.full(x_TSE.shape[:2], 1.0 / self._streams, device=x_TSE.device)
        return summed(x_TSE, share_TS)


class StreamProjection:
    """x_TSE -> y_TX: a linear map of all streams of a token, normed together, in float32."""

    def __init__(
        self, scope: Scope, name: str, shape: tuple[int, int], *, streams: int, eps: float
    ) -> None:
        self._scope = replace(scope, dtype=torch.float32)
        self._norm = RMS_NO_WEIGHT.build(self._scope, shape[1], eps=eps)
        self._weight = self._scope.param(name, shape)
        self._project: Linear = not_loaded
        self._opened: GatedNorm = not_loaded
        self._streams = streams
        scope.on_finish(self._finish)

    def of(self, x_TSE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._project(self._norm.norm(x_TSE.flatten(1).float()))

    def sigmoid(self, x_TS: torch.Tensor) -> torch.Tensor:
        """Of numbers for each stream, by an op: those of PyTorch depend on their place."""
        return self._opened(torch.ones_like(x_TS), x_TS.contiguous())

    def _finish(self) -> None:
        self._project = bind_linear(self._scope, self._weight.take(), None)
        facts = {"device": self._scope.kind, "dtype": torch.float32}
        problem = GatedNormProblem(**facts, width=self._streams, group=0, gate="sigmoid")
        self._opened = self._scope.bind(GATED_NORM, problem, None)

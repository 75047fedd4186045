"""A residual of several streams that gate themselves (Qwen 4): a branch reads the mean of the
normed streams, each element times the sigmoid of a projection of all of them through a bottleneck;
what it gives is added to each stream with a weight of the same streams.

T tokens, E hidden size, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.activation.op import OP as ACTIVATION
from headrace.back.kernels.activation.op import Activation, ActivationProblem
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.streams import StreamWeights, expanded, summed

NAMES = ("attn_hyper_connection", "mlp_hyper_connection")
END = "hyper_connection_mixer"


@dataclass(frozen=True, kw_only=True)
class GatedStreamsSpec:
    """`streams`: S; `rank`: of the bottleneck. See ConnectedStreamsSpec."""

    streams: int
    rank: int
    eps: float

    def build(self, scope: Scope, width: int) -> GatedStreams:
        """The streams' begin and end."""
        return GatedStreams(scope / END, self, width, adds=False)

    def connect(self, scope: Scope, branch: int, width: int) -> GatedStreams:
        """See ConnectedStreamsSpec."""
        return GatedStreams(scope / NAMES[branch], self, width, adds=True)


class StreamsNorm:
    """x_TSE -> y_TSE: each stream normed, with weights of its own, of which 1 is not stored."""

    def __init__(self, scope: Scope, streams: int, width: int, *, eps: float) -> None:
        self._norm = RMS_NO_WEIGHT.build(scope, width, eps=eps)
        self._weight = scope.param("weight", (streams * width,), init="zeros")
        self._weight_SE, self._shape = torch.empty(0), (streams, width)
        scope.on_finish(self._finish)

    def norm(self, x_TSE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return (self._norm.norm(x_TSE).float() * self._weight_SE).to(x_TSE.dtype)

    def _finish(self) -> None:
        self._weight_SE = (self._weight.take().float() + 1.0).view(self._shape)


class GatedStreams:
    """See StreamConnection and ResidualStreams. `adds`: results are added, which have weights."""

    def __init__(self, scope: Scope, spec: GatedStreamsSpec, width: int, *, adds: bool) -> None:
        self._scope, self._spec, self._width = scope, spec, width
        whole = spec.streams * width
        self._norm = StreamsNorm(scope / "hc_norm", spec.streams, width, eps=spec.eps)
        self._down = WholeLinear(scope / "input_mix_weight_down", whole, spec.rank)
        self._up = WholeLinear(scope / "input_mix_weight_up", spec.rank, whole)
        self._inject = (
            WholeLinear(scope / "block_inject_weight", whole, spec.streams) if adds else None
        )
        self._act: Activation = not_loaded
        self._gated: GatedNorm = not_loaded
        self._opened: GatedNorm = not_loaded
        scope.on_finish(self._finish)

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """x_TSE of the tokens' embeddings."""
        return x_TE[:, None].repeat(1, self._spec.streams, 1)

    def end(self, x_TSE: torch.Tensor) -> torch.Tensor:
        """x_TE behind the last layer."""
        return self._mixed(self._norm.norm(x_TSE).flatten(1))

    def collapse(self, x_TSE: torch.Tensor) -> tuple[StreamWeights, torch.Tensor]:
        """See StreamConnection."""
        assert self._inject is not None, "the end adds nothing"
        normed_TX, streams = self._norm.norm(x_TSE).flatten(1), self._spec.streams
        inject_TS = self._inject.project(normed_TX) / streams
        result_TS = 2.0 * self._opened(torch.ones_like(inject_TS), inject_TS)
        return StreamWeights(result_TS), self._mixed(normed_TX)

    def expand(
        self, weights: StreamWeights, y_TE: torch.Tensor, x_TSE: torch.Tensor
    ) -> torch.Tensor:
        """See StreamConnection."""
        return expanded(weights, y_TE, x_TSE)

    def _mixed(self, normed_TX: torch.Tensor) -> torch.Tensor:
        streams = self._spec.streams
        gate_TX = self._up.project(self._act(self._down.project(normed_TX) / streams))
        y_TSE = self._gated(normed_TX, gate_TX).unflatten(1, (streams, -1))
        return summed(y_TSE, y_TSE.new_full(y_TSE.shape[:2], 1.0 / streams).float())

    def _finish(self) -> None:
        facts = {"device": self._scope.kind, "dtype": self._scope.dtype}
        self._act = self._scope.bind(ACTIVATION, ActivationProblem(**facts, activation="silu"))
        streams = self._spec.streams
        gate = {**facts, "group": 0, "gate": "sigmoid"}
        whole = GatedNormProblem(**gate, width=streams * self._width)
        self._gated = self._scope.bind(GATED_NORM, whole, None)
        self._opened = self._scope.bind(GATED_NORM, GatedNormProblem(**gate, width=streams), None)

"""Streams of a residual whose weights for a branch's inputs are those that the branch before it
made (DeepSeek V4.1, "single-pass mHC"): all weights of a place come of one pass over the streams,
and the first branch reads the first stream.

The weights for the next branch lie in a place that all branches share: a step that is recorded
reads the tensor that it wrote itself. T tokens, E hidden size, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from headrace.back.layers.hyper_connections import HyperConnection, HyperSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.streams import StreamWeights, expanded, summed

NAMES = ("attn_hc", "ffn_hc")


class NextInputs:
    """input_TS of the branch that comes next."""

    def __init__(self) -> None:
        self.input_TS = torch.empty(0)


class SinglePassWeights(NamedTuple):
    """See StreamWeights; with the inputs' weights of the next branch."""

    own: StreamWeights
    input_TS: torch.Tensor

    def at(self, at_N: torch.Tensor) -> SinglePassWeights:
        """Those of the tokens `at_N`."""
        return SinglePassWeights(self.own.at(at_N), self.input_TS.index_select(0, at_N))


@dataclass(frozen=True, kw_only=True)
class SinglePassSpec:
    """`hyper`: how weights are made of the streams."""

    hyper: HyperSpec
    following: NextInputs = field(default_factory=NextInputs)

    def connect(self, scope: Scope, branch: int, width: int) -> SinglePassConnection:
        """See ConnectedStreamsSpec."""
        hyper = HyperConnection(scope / NAMES[branch], self.hyper, width)
        return SinglePassConnection(hyper, self.following)

    def build(self, scope: Scope, width: int) -> SinglePassEnds:
        """See ConnectedStreamsSpec."""
        return SinglePassEnds(self.hyper.streams, self.following)


class SinglePassConnection:
    """See StreamConnection."""

    def __init__(self, hyper: HyperConnection, following: NextInputs) -> None:
        self._hyper, self._next = hyper, following

    def collapse(self, x_TSE: torch.Tensor) -> tuple[SinglePassWeights, torch.Tensor]:
        """See StreamConnection."""
        input_TS, weights = self._hyper.weights(x_TSE)
        return SinglePassWeights(weights, input_TS), summed(x_TSE, self._next.input_TS)

    def expand(
        self, weights: SinglePassWeights, y_TE: torch.Tensor, x_TSE: torch.Tensor
    ) -> torch.Tensor:
        """See StreamConnection; the next branch reads by these weights."""
        self._next.input_TS = weights.input_TS
        return expanded(weights.own, y_TE, x_TSE)


class SinglePassEnds:
    """See ResidualStreams: all streams begin alike, and end as the next branch would read them."""

    def __init__(self, streams: int, following: NextInputs) -> None:
        self._streams, self._next = streams, following

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """x_TSE of the tokens' embeddings."""
        first_S = torch.arange(self._streams, device=x_TE.device) == 0
        self._next.input_TS = first_S.float().expand(len(x_TE), -1)
        return x_TE[:, None].repeat(1, self._streams, 1)

    def end(self, x_TSE: torch.Tensor) -> torch.Tensor:
        """x_TE behind the last layer."""
        return summed(x_TSE, self._next.input_TS)

"""A residual of several streams [T, S, E]: where it begins and ends, and what a layer asks of it,
how each of its two branches is connected with it. T tokens, E hidden size, S streams.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.scope import Scope


class ResidualStreamsSpec(Protocol):
    """A residual of several streams as data of its decoder."""

    def build(self, scope: Scope, width: int) -> ResidualStreams:
        """`scope` is that of the embedding."""
        ...


class ResidualStreams(Protocol):
    """A residual of S streams, [S, T, E] or [T, S, E] as the decoder's layers keep it."""

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The streams of the tokens' embeddings."""
        ...

    def end(self, streams: torch.Tensor, /) -> torch.Tensor:
        """x_TE behind the last layer."""
        ...


class StreamWeights(NamedTuple):
    """Of one branch: what its result is added to each stream with, and the streams' mixture, if
    they are mixed."""

    result_TS: torch.Tensor
    mixture_TSS: torch.Tensor | None = None

    def at(self, at_N: torch.Tensor) -> StreamWeights:
        """Those of the tokens `at_N`."""
        mixture = None if self.mixture_TSS is None else self.mixture_TSS.index_select(0, at_N)
        return StreamWeights(self.result_TS.index_select(0, at_N), mixture)


class StreamConnection(Protocol):
    """Around one branch."""

    def collapse(self, x_TSE: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The weights of these streams, with `at` as StreamWeights, and what the branch reads,
        x_TE."""
        ...

    def expand(self, weights: Any, y_TE: torch.Tensor, x_TSE: torch.Tensor) -> torch.Tensor:
        """The streams behind the branch that gave y_TE."""
        ...


class ConnectedStreamsSpec(Protocol):
    """Such a residual as data of a decoder and of its layers."""

    def build(self, scope: Scope, width: int) -> ResidualStreams:
        """The streams' begin and end; `scope` is that of the embedding."""
        ...

    def connect(self, scope: Scope, branch: int, width: int) -> StreamConnection:
        """Around branch 0, the mixer, or 1, the feed-forward, of the layer at `scope`."""
        ...


class StreamInputs(Protocol):
    """What a layer adds to the streams by the tokens themselves, before its branches."""

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Its caches."""
        ...

    def of(self, x_TSE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What is added to these streams, [T, S, E]."""
        ...


class StreamInputsSpec(Protocol):
    """Such inputs as data of a layer. `name`: their module."""

    @property
    def name(self) -> str: ...

    def build(self, scope: Scope, cache: int, width: int) -> StreamInputs:
        """`cache`: the id of the first of its caches."""
        ...


def summed(x_TSE: torch.Tensor, weight_TS: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the streams, in their order, so that a token's bits are its own."""
    sum_TE = x_TSE[:, 0].float() * weight_TS[:, :1]
    for stream in range(1, x_TSE.shape[1]):
        sum_TE += x_TSE[:, stream].float() * weight_TS[:, stream : stream + 1]
    return sum_TE.to(x_TSE.dtype)


def expanded(weights: StreamWeights, y_TE: torch.Tensor, x_TSE: torch.Tensor) -> torch.Tensor:
    """The streams, mixed if they are, and the result added to each with its weight."""
    wide_TSE = x_TSE.float()
    if weights.mixture_TSS is not None:
        wide_TSE = torch.bmm(weights.mixture_TSS.transpose(1, 2), wide_TSE)
    added_TSE = weights.result_TS[:, :, None] * y_TE.float()[:, None]
    return (added_TSE + wide_TSE).to(x_TSE.dtype)

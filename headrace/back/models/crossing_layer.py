"""What an encoder-decoder asks of the layers of its decoder, which read its encoder's outputs. T
tokens of a step, S outputs of the encoder, E hidden size."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream


class CrossingLayerSpec(Protocol):
    """A decoder layer as data of its encoder-decoder; `build` makes it on this rank, with its
    caches `cache` and the one behind it."""

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norm: NormSpec) -> CrossingLayer:
        """`scope` is the layer's; `norm`: the kind of its norms."""
        ...


class CrossWriter(Protocol):
    """What keeps the encoder's outputs for a layer."""

    def write(
        self, source_SE: torch.Tensor, batch: Batch, slots_GS: tuple[torch.Tensor, ...], /
    ) -> None:
        """Keeps the keys and values of these outputs in the slots of their group."""
        ...


class CrossingLayer(Protocol):
    """What an encoder-decoder asks of a layer of its decoder."""

    @property
    def cross(self) -> CrossWriter: ...

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]: ...

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """The stream behind the layer. `last`: no later layer writes a cache."""
        ...

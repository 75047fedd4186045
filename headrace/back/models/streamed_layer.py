"""Layers of a decoder whose weights, or whose experts', lie in host memory (layers/offload.py): how
they are built, and what they do around their pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.offload import HostPart, Offload
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import Layer, LayerAround, Stream


@contextmanager
def host_layer(at: Scope, index: int) -> Iterator[tuple[Scope, list[Layer]]]:
    """The scope to build layer `index` in, and a list to leave it in. If its weights lie in host
    memory, so does what its finishers make of them."""
    offload, built, ledger = at.offload, list[Layer](), at.ledger
    if offload is None or index not in offload.layers:
        yield at, built
        return
    part = offload.part(index)
    first, first_param = len(ledger.finishers), len(ledger.params)
    yield replace(at, host_experts=part) if offload.experts else replace(at, host=part), built
    if offload.experts:
        part.routed = next(p.routed for p in ledger.params[first_param:] if p.routed is not None)
    else:
        own = ledger.finishers[first:]
        ledger.finishers[first:] = [partial(_finish, part, built[0], own, at)]


def _finish(part: HostPart, layer: Layer, own: Sequence[Callable[[], None]], at: Scope) -> None:
    """A layer is packed and bound on the device, and its weights leave it again."""
    part.bring(layer, without=at.beside)
    for finish in own:
        finish()
    part.keep(layer, without=(*at.beside, layer.tail), shared=at.ledger.tables.values())


def streamed(layers: list[Layer], scope: Scope) -> list[Layer]:
    """The layers, those around whose pass something is done replaced."""
    offload = scope.offload
    if offload is None:
        return layers
    plain = tuple(layers)
    scope.on_finish(lambda: offload.settle(plain, without=scope.beside))
    numbers = {index: number for number, index in enumerate(sorted(offload.layers))}
    return [
        StreamedLayer(layer, offload, numbers.get(index), begins=index == 0)
        if index == 0 or index in numbers
        else layer
        for index, layer in enumerate(layers)
    ]


class StreamedLayer(LayerAround):
    """A layer, with its part of the stream in its slot while it runs. `number`: of the part, None:
    it has none; `begins`: the step's first layer starts the stream."""

    def __init__(self, layer: Layer, offload: Offload, number: int | None, *, begins: bool) -> None:
        super().__init__(layer)
        self._offload, self._number, self._begins = offload, number, begins

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        weights = self._offload.stream
        assert weights is not None, "the weights are not loaded"
        if self._begins:
            tokens: torch.Tensor = batch.token_ids_T
            weights.begin(len(tokens))
        if self._number is None:
            return self._layer.forward(stream, batch, last=last)
        weights.use(self._number)
        after = self._layer.forward(stream, batch, last=last)
        weights.done(self._number)
        return after

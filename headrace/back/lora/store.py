"""The adapters a rank holds: in host memory by name, and in the slots of its model.

Called by a thread beside the one that runs the steps, one call at a time. A slot is written while
no row has it; whoever says which slot (the core) sees to that, and to the order: a step with rows
of a slot is launched after `place` has returned. On a GPU it has a stream of its own, for which it
waits: to wait for the whole device breaks a graph that the other thread may be recording.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.back.layers.adapter_shares import AdapterShare, LowRank
from headrace.back.layers.adapters import AdaptedLinear, AdapterSlots
from headrace.back.lora.peft import read_adapter
from headrace.base.errors import HeadraceError, to_wire
from headrace.base.wire.step import AdapterOrder, AdapterReply

log = logging.getLogger(__name__)


class AdapterStore:
    """See the top of the file."""

    def __init__(self, slots: AdapterSlots, device: torch.device) -> None:
        self._slots = slots
        self._modules = slots.elsewhere | slots.modules
        self._adapters: dict[str, list[Any | None]] = {}
        self._placed: dict[int, str] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._groups: tuple[dist.ProcessGroup | None, ...] = (None, None)
        if any(linear.problem.turned and linear.adds_up for linear in slots.linears):
            # Apart from the steps' own sums, and those of this thread from those of `renew`.
            self._groups = tuple(dist.new_group(backend="gloo") for _ in range(2))

    def carry_out(self, order: AdapterOrder) -> AdapterReply:
        """One order; what it could not do is told in the reply."""
        try:
            if order.action == "read":
                with self._on_stream():
                    return self.read(order.name, order.folder)
            if order.action == "place":
                self.place(order.name, order.slot)
            else:
                self.drop(order.name)
        except Exception as error:
            if not isinstance(error, HeadraceError):
                log.exception("adapter %s: %s failed", order.name, order.action)
            return AdapterReply(error=to_wire(error))
        return AdapterReply()

    def read(self, name: str, folder: str) -> AdapterReply:
        """Reads an adapter into host memory, in place of one of the same name; CheckpointError if
        it does not fit this model."""
        slots = self._slots
        adapter = read_adapter(
            Path(folder), self._modules, max_rank=slots.max_rank, kinds=slots.kinds
        )
        shares: list[Any | None] = []
        for layer in slots.layers:
            pairs: dict[str, LowRank] = {
                module: adapter.pairs[module] for module in layer.modules if module in adapter.pairs
            }
            shares.append(layer.share(pairs) if pairs else None)
        self._turn(shares, self._groups[0])
        self._adapters[name] = shares
        return AdapterReply(
            rank=adapter.rank, num_bytes=adapter.num_bytes, num_modules=len(adapter.pairs)
        )

    def renew(self) -> None:
        """The weights have changed: factors of magnitudes are taken again, those in slots too.
        Called by the thread that runs the steps."""
        for shares in list(self._adapters.values()):
            for layer, share in self._turned(shares):
                layer.measure(share)
            self._turn(shares, self._groups[1])
        for slot, name in list(self._placed.items()):
            if name in self._adapters and self._turned(self._adapters[name]):
                self.place(name, slot)

    def _turned(self, shares: list[Any | None]) -> list[tuple[AdaptedLinear, AdapterShare]]:
        """The layers whose outputs have magnitudes."""
        return [
            (layer, share)
            for layer, share in zip(self._slots.layers, shares, strict=True)
            if isinstance(layer, AdaptedLinear) and share is not None and share.turn_2O is not None
        ]

    def _turn(self, shares: list[Any | None], group: dist.ProcessGroup | None) -> None:
        """Magnitudes become factors, once the lengths they are for are summed over the ranks."""
        turned = self._turned(shares)
        parts = [
            share.squares_O
            for layer, share in turned
            if layer.adds_up and share.squares_O is not None
        ]
        if parts:
            sums = torch.cat(parts)
            dist.all_reduce(sums, group=group)
            for part, whole in zip(parts, sums.split([len(part) for part in parts]), strict=True):
                part.copy_(whole)
        for layer, share in turned:
            layer.turn(share)

    def place(self, name: str, slot: int) -> None:
        """Puts an adapter that was read into a slot."""
        self._placed[slot] = name
        with torch.inference_mode(), self._on_stream():
            for layer, share in zip(self._slots.layers, self._adapters[name], strict=True):
                layer.put(slot, share)
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def drop(self, name: str) -> None:
        """Lets an adapter in host memory go."""
        self._adapters.pop(name, None)

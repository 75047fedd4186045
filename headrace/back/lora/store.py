"""The adapters a rank holds: in host memory by name, and in the slots of its model.

Called by a thread beside the one that runs the steps, one call at a time. A slot is written while
no row has it; whoever says which slot (the core) sees to that, and to the order: a step with rows
of a slot is launched after `place` has returned.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from headrace.back.layers.adapters import AdapterShare, AdapterSlots, LowRank
from headrace.back.lora.peft import read_adapter
from headrace.base.errors import HeadraceError, to_wire
from headrace.base.wire.step import AdapterOrder, AdapterReply

log = logging.getLogger(__name__)


class AdapterStore:
    """See the top of the file."""

    def __init__(self, slots: AdapterSlots, device: torch.device) -> None:
        self._slots = slots
        self._device = device
        self._modules = {
            name: module for linear in slots.linears for name, module in linear.modules.items()
        }
        self._adapters: dict[str, list[AdapterShare | None]] = {}

    def carry_out(self, order: AdapterOrder) -> AdapterReply:
        """One order; what it could not do is told in the reply."""
        try:
            if order.action == "read":
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
        adapter = read_adapter(Path(folder), self._modules, max_rank=self._slots.max_rank)
        shares: list[AdapterShare | None] = []
        for linear in self._slots.linears:
            pairs: dict[str, LowRank] = {
                module: adapter.pairs[module]
                for module in linear.modules
                if module in adapter.pairs
            }
            shares.append(linear.share(pairs) if pairs else None)
        self._adapters[name] = shares
        return AdapterReply(
            rank=adapter.rank, num_bytes=adapter.num_bytes, num_modules=len(adapter.pairs)
        )

    def place(self, name: str, slot: int) -> None:
        """Puts an adapter that was read into a slot."""
        with torch.inference_mode():
            for linear, share in zip(self._slots.linears, self._adapters[name], strict=True):
                linear.put(slot, share)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def drop(self, name: str) -> None:
        """Lets an adapter in host memory go."""
        self._adapters.pop(name, None)

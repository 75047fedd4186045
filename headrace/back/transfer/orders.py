"""What one worker does with orders about its weights. Nothing here raises: an order that cannot be
carried out is answered with why."""

from __future__ import annotations

import logging
import time

import torch

from headrace.back.models.load import Origin
from headrace.back.models.load.source import Source
from headrace.back.transfer.direct import DirectUpdate, DirectWeights
from headrace.back.transfer.groups import WeightGroups
from headrace.back.transfer.handles import opened
from headrace.back.transfer.live import digest_of, values_of
from headrace.back.transfer.sources import (
    TensorSource,
    as_stored,
    cut_buffer,
    dtype_of,
    num_bytes_of,
    read_safetensors,
)
from headrace.back.transfer.update import WeightUpdate
from headrace.base.errors import Conflict, HeadraceError, InvalidRequest, to_wire
from headrace.base.wire.weights import WeightOrder, WeightReply

log = logging.getLogger(__name__)


class WeightOrders:
    """The updates of one loaded model. `join` and `leave` are carried out by threads of their own,
    everything else by the one that runs the steps."""

    def __init__(self, origin: Origin | None, device: torch.device, rank: int) -> None:
        self._origin = origin
        self._device = device
        self._groups = WeightGroups(device, rank)
        self._update: WeightUpdate | DirectUpdate | None = None
        self._direct: DirectWeights | None = None

    def carry_out(self, order: WeightOrder) -> WeightReply:
        """What became of an order."""
        before = self._written
        try:
            return self._carry_out(order)
        except HeadraceError as error:
            return WeightReply(error=to_wire(error), changed=self._written != before)
        except Exception as error:
            log.exception("an order about weights failed")
            return WeightReply(error=to_wire(error), changed=self._written != before)

    def close(self) -> None:
        """The model goes: so do the groups that its trainers made."""
        self._groups.close()

    @property
    def _written(self) -> int:
        return 0 if self._update is None else self._update.num_bytes

    def _carry_out(self, order: WeightOrder) -> WeightReply:
        match order.action:
            case "push":
                return self._push(order)
            case "finish":
                return self._finish()
            case "drop":
                self._update = None
            case "join":
                self._groups.join(order.group)
            case "leave":
                self._groups.leave(order.group.name)
            case "read":
                values = values_of(self._known_origin, order.layout.names[0], order.count)
                return WeightReply(values=values)
            case "digest":
                return WeightReply(digest=digest_of(self._known_origin))
            case _:
                raise InvalidRequest(f"action: {order.action!r:.40} is unknown", field="action")
        return WeightReply()

    @property
    def _known_origin(self) -> Origin:
        if self._origin is None:
            raise Conflict("the weights of this model cannot be told or replaced")
        return self._origin

    def _push(self, order: WeightOrder) -> WeightReply:
        begin = time.perf_counter()
        source = self._source(order)
        opened_at = time.perf_counter()
        try:
            if self._update is None:
                self._update = self._begun()
            update = self._update
            seconds = {"open": opened_at - begin, "begin": time.perf_counter() - opened_at}
            before = update.num_bytes
            try:
                update.push(as_stored(source, self._known_origin.spec), last=order.last)
            except HeadraceError:
                if update.num_bytes == 0:
                    self._update = None  # nothing has changed: the next push begins anew
                raise
        finally:
            source.close()
        if order.last:
            self._end(update)
        seconds |= update.seconds
        phases = ", ".join(f"{name} {spent:.3f}" for name, spent in seconds.items())
        log.debug("weights pushed in %.3f s: %s", time.perf_counter() - begin, phases)
        return WeightReply(num_bytes=update.num_bytes - before, changed=True, seconds=seconds)

    def _begun(self) -> WeightUpdate | DirectUpdate:
        if self._direct is not None:
            return DirectUpdate(self._direct, self._device)
        return WeightUpdate(self._known_origin, self._device)

    def _end(self, update: WeightUpdate | DirectUpdate) -> None:
        self._update, self._direct = None, update.direct()

    def _finish(self) -> WeightReply:
        if self._update is None:
            raise Conflict("no update has been begun")
        update, before = self._update, self._update.num_bytes
        update.finish()
        self._end(update)
        return WeightReply(num_bytes=update.num_bytes - before, changed=True)

    def _source(self, order: WeightOrder) -> Source:
        layout = order.layout
        if order.way == "files":
            return read_safetensors(order.path)
        lengths = {len(layout.names), len(layout.dtypes), len(layout.shapes)}
        if len(lengths) != 1 or not layout.names or len(set(layout.names)) != len(layout.names):
            raise InvalidRequest(
                f"names: {len(layout.names)} of them, {len(layout.dtypes)} dtypes and "
                f"{len(layout.shapes)} shapes are given; each tensor has one of each, once",
                field="names",
            )
        names, dtypes, shapes = layout.names, layout.dtypes, layout.shapes
        if order.way == "handles":
            buffer = opened(order.handles, self._device)
            wanted = num_bytes_of(dtypes, shapes)
            if len(buffer) < wanted:
                raise InvalidRequest(
                    f"handles: {len(buffer)} bytes are lent, the tensors have {wanted}",
                    field="handles",
                )
            return TensorSource(cut_buffer(buffer, names, dtypes, shapes), "lent memory")
        if order.way != "group":
            raise InvalidRequest(f"way: {order.way!r:.40} is unknown", field="way")
        name_of_group = order.group.name
        self._groups.named(name_of_group)
        where = f"group {name_of_group}"
        if order.packed:
            size = num_bytes_of(dtypes, shapes)
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._groups.receive(name_of_group, [buffer])
            return TensorSource(cut_buffer(buffer, names, dtypes, shapes), where)
        tensors = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensors[name] = torch.empty(shape, dtype=dtype_of(dtype), device=self._device)
        self._groups.receive(name_of_group, list(tensors.values()))
        return TensorSource(tensors, where)

"""A second model of the same making, through which new weights reach the one that runs.

What a running model multiplies by was made of its parameters when it was loaded: packed, quantized,
converted, fused. Recorded steps and bound kernels know where it lies. So new weights take the same
way once more: they fill the parameters of a second model, which has no memory but for those, its
layers do the work that was put off until then, and what comes of it is copied to where the first
model has the same. One layer after another, so that no more memory is taken than a few layers need.

A `Unit` is an object whose work was put off (a linear layer, a norm, a head). It needs its own
parameters, and those of the units it holds (a tied head its embedding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.back.layers.reachable import bytes_of
from headrace.back.layers.scope import Ledger
from headrace.back.models.load import Origin
from headrace.back.models.weights import Param, WeightPlan
from headrace.back.transfer.graph import owner_of, reached, side_by_side
from headrace.base.errors import Conflict, EngineError, InvalidRequest

Cut = tuple[slice | int, ...]


@dataclass(eq=False)
class Unit:
    """See the top of the file. `own`: its parameters; `needs`: units it holds, at any depth;
    `waiting`: units that hold it and have not been committed. Once it is finished: `tensors`, what
    came of it; `kept`, its parameters with those of them that are a parameter's values; and of a
    unit that lacks a part, `plain`: its parameters and their tensors."""

    number: int
    owner: object
    live: object
    finish: Callable[[], None]
    own: tuple[Param, ...] = ()
    needs: tuple[Unit, ...] = ()
    waiting: int = 0
    is_finished: bool = False
    is_committed: bool = False
    tensors: list[torch.Tensor] = field(default_factory=list)
    kept: list[tuple[Param, torch.Tensor]] = field(default_factory=list)
    plain: list[tuple[Param, torch.Tensor]] = field(default_factory=list)

    @property
    def params(self) -> tuple[Param, ...]:
        """Its own, and those of the units it holds."""
        return (*self.own, *(param for unit in self.needs for param in unit.own))


class Shadow:
    """The second model of one update. `plan`: what it wants of a checkpoint; `units` in the order
    in which their work is done."""

    def __init__(self, origin: Origin) -> None:
        ledger = Ledger()
        model = origin.rebuild(ledger)
        self.plan: WeightPlan = model.weights
        self._model = model
        self.units = _units(ledger, origin.ledger)
        self._kept: dict[int, torch.Tensor] = {}
        self._remade: set[int] = set()
        if not self.units:
            raise Conflict(
                "the weights of a model of the transformers fallback cannot be replaced while it is "
                "loaded: POST /v1/admin/reload_model loads others"
            )
        for unit in self.units:
            for needed in unit.needs:
                needed.waiting += 1

    def commit(self, unit: Unit) -> int:
        """Copies what comes of the unit into the live model; its bytes. Its own parameters are
        full; those of the units it holds may not be, and then nothing is told of them."""
        self.finish(unit)
        places = self._places(unit)
        num_bytes = _copy(unit, self._pairs(unit, places))
        storages = {_storage(tensor) for _, tensor in unit.kept}
        if all(_storage(tensor) in storages for tensor in unit.tensors):
            for param, tensor in unit.kept:
                self._kept[id(param)] = _same(places[_storage(tensor)][0], tensor)
        else:
            self._remade.update(map(id, unit.params))
        self._done(unit)
        return num_bytes

    @property
    def held(self) -> dict[int, torch.Tensor]:
        """By parameter (id) the live model's tensor, where nothing else was made of it in a
        committed unit, or in one that holds that; it may be wider (`Param.as_float`)."""
        return {param: one for param, one in self._kept.items() if param not in self._remade}

    def commit_rows(self, unit: Unit, written: Mapping[int, Sequence[Cut]]) -> int:
        """The same of a unit of whose parameters (by id) only some rectangles are there: they alone
        are copied. To be asked for by `finish_part` before."""
        num_bytes = 0
        for param, tensor in unit.plain:
            live = self.live_of(unit, param)
            for cut in written.get(id(param), ()):
                live[cut].copy_(tensor[cut])
                num_bytes += tensor[cut].nbytes
        self._done(unit)
        return num_bytes

    def live_of(self, unit: Unit, param: Param) -> torch.Tensor:
        """The live model's tensor of a parameter that it holds as it is, behind `finish_part`."""
        tensor = next(plain for one, plain in unit.plain if one is param)
        return _same(self._places(unit)[_storage(tensor)][0], tensor)

    def finish_part(self, unit: Unit) -> None:
        """Does the work of a unit that lacks a part of its parameters, without a change to the live
        model. InvalidRequest unless that holds the parameters as they are."""
        waiting = [one for one in (*unit.needs, unit) if not one.is_finished]
        packed = [
            param
            for one in waiting
            for param in one.own
            if param.tensor is None and not param.bundle
        ]
        if not packed and not unit.is_finished:
            unit.plain = [(param, param.tensor) for param in unit.own if param.tensor is not None]
            self.finish(unit)
        plain = {_storage(tensor) for _, tensor in unit.plain}
        if packed or any(_storage(tensor) not in plain for tensor in unit.tensors):
            param = (*packed, *unit.own, *unit.params)[0]
            names = ", ".join(piece.name for one in unit.params for piece in one.pieces)
            raise InvalidRequest(
                f"names: what becomes {param.name} is kept packed, and only a part of it is given; "
                f"of these give all or none: {names:.600}",
                field="names",
            )

    def finish(self, unit: Unit) -> None:
        """Does the work of a unit, and that of those it holds before."""
        for needed in unit.needs:
            self.finish(needed)
        if unit.is_finished:
            return
        for param in unit.own:
            give_memory(param)
        known = {_storage(tensor) for one in unit.needs for tensor in one.tensors}
        filled = [(param, param.tensor) for param in unit.own if _is_plain(param)]
        unit.finish()
        unit.is_finished = True
        unit.tensors = [one for one in _tensors_of(unit.owner) if _storage(one) not in known]
        storages = {_storage(tensor) for tensor in unit.tensors}
        for param, tensor in filled:
            values = tensor if param.as_float is None else param.as_float[0]
            if values is not None and _storage(values) in storages:
                unit.kept.append((param, values))

    def _places(self, unit: Unit) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By storage of the new tensors: (live, new)."""
        places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for one, other in side_by_side(unit.live, unit.owner):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                places.setdefault(_storage(other), (one, other))
            elif one != other and one == one:
                raise EngineError(
                    f"{_named(unit)} keeps a number apart from its tensors, which new weights "
                    f"change ({one} becomes {other}): load them with reload_model"
                )
        return places

    def _pairs(
        self, unit: Unit, places: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(live, new) of the unit's own tensors; EngineError if they do not fit each other."""
        lacking = {_storage(tensor) for tensor in unit.tensors} - places.keys()
        if lacking:  # no weight if both hold it: room that all layers of a device share
            lacking -= {_storage(tensor) for tensor in _tensors_of(unit.live)}
            if lacking:
                raise EngineError(f"{_named(unit)}: the running model lacks a tensor of its own")
            unit.tensors = [one for one in unit.tensors if _storage(one) in places]
        pairs = []
        for tensor in unit.tensors:
            one, other = places[_storage(tensor)]
            fits = one.shape == other.shape and one.dtype == other.dtype
            fits &= one.layout == other.layout and _num_bytes(one) >= _num_bytes(other)
            if not fits or (not one.is_mkldnn and one.storage_offset() != other.storage_offset()):
                raise EngineError(
                    f"{_named(unit)}: {list(other.shape)} {other.dtype} does not fit the running "
                    f"model's {list(one.shape)} {one.dtype}"
                )
            pairs.append((one, other))
        return pairs

    def _done(self, unit: Unit) -> None:
        """Gives back the memory of units that nobody waits for any more."""
        unit.is_committed = True
        for needed in unit.needs:
            needed.waiting -= 1
        for one in (unit, *unit.needs):
            if one.is_committed and one.waiting == 0:
                for tensor in one.tensors:
                    if not tensor.is_mkldnn and tensor.untyped_storage().resizable():
                        tensor.untyped_storage().resize_(0)
                one.tensors, one.kept, one.plain = [], [], []


def _is_plain(param: Param) -> bool:
    """Whether its tensor is all that becomes of it. Of one number a layer may keep it apart."""
    packed = param.bundle is not None or param.on_groups is not None or param.on_blocks is not None
    return param.tensor is not None and param.tensor.numel() > 1 and not packed


def _same(live: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The live model's tensor, seen as the new one lies in its storage."""
    same = torch.empty(0, dtype=tensor.dtype, device=live.device)
    return same.set_(live.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def give_memory(param: Param) -> None:
    """Memory for a parameter of a model without it, filled with zeros."""
    for tensor in (param.tensor, *param.members.values()):
        if tensor is not None and tensor.numel() and not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()


def _units(ledger: Ledger, live: Ledger) -> list[Unit]:
    owners = [owner_of(finish) for finish in ledger.finishers]
    assert len(owners) == len(live.finished), (len(owners), len(live.finished))
    units = [
        Unit(number=number, owner=owner, live=owner_of(done), finish=finish)
        for number, (owner, done, finish) in enumerate(
            zip(owners, live.finished, ledger.finishers, strict=True)
        )
    ]
    stop = {id(owner) for owner in owners}
    by_owner: dict[int, list[Unit]] = {}
    for unit in units:
        by_owner.setdefault(id(unit.owner), []).append(unit)
    direct: dict[int, set[int]] = {}
    claimed: Counter[int] = Counter()
    for unit in units:
        held = list(reached(unit.owner, stop))
        own = [item for item in held if isinstance(item, Param) and not claimed[id(item)]]
        claimed.update(id(param) for param in own)
        unit.own = tuple(own)
        direct[unit.number] = {
            other.number
            for item in held
            for other in by_owner.get(id(item), ())
            if other is not unit
        }
    for unit in units:
        numbers = _closure(unit.number, direct)
        unit.needs = tuple(units[number] for number in sorted(numbers))
    return units


def _closure(start: int, direct: dict[int, set[int]]) -> set[int]:
    numbers: set[int] = set()
    stack = list(direct[start])
    while stack:
        number = stack.pop()
        if number not in numbers and number != start:
            numbers.add(number)
            stack += direct[number]
    return numbers


def _copy(unit: Unit, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    num_bytes = 0
    for one, other in pairs:
        if one.is_mkldnn:
            one.copy_(other)
            num_bytes += one.nbytes
        elif _storage(one) != _storage(other):
            count = other.untyped_storage().nbytes()
            to, new = (bytes_of(t.untyped_storage(), t.device, count) for t in (one, other))
            to.copy_(new)
            num_bytes += count
    return num_bytes


def _tensors_of(owner: object) -> Iterable[torch.Tensor]:
    """What the owner of a unit holds, one tensor for each storage."""
    tensors: dict[int, torch.Tensor] = {}
    for item in reached(owner, set()):
        if isinstance(item, torch.Tensor) and _num_bytes(item):
            tensors.setdefault(_storage(item), item)
    return tensors.values()


def _storage(tensor: torch.Tensor) -> int:
    """Where its memory begins; what oneDNN has packed has no storage that PyTorch knows."""
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn.data_ptr(tensor))
    return tensor.untyped_storage().data_ptr()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.is_mkldnn else tensor.untyped_storage().nbytes()


def _named(unit: Unit) -> str:
    return unit.own[0].name if unit.own else type(unit.owner).__name__

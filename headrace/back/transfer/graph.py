"""What an object holds, place by place; and two objects of the same making, walked side by side.

Layers keep weights in attributes, containers, bound methods and the closures of kernels. Where each
lies is the same in two models that were built alike, so that a walk over both finds which tensor of
one is which of the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType

import torch

from headrace.back.kernels.op import Kernel, Op
from headrace.back.layers.adapters import AdaptedLinear, AdapterSlots
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.parallel.mesh import Axis, Mesh

_SHARED = (Scope, Ledger, Mesh, Axis, AdapterSlots, AdaptedLinear, Op, Kernel)
"""What layers share with others, and what holds no weight of theirs."""
_PLAIN = (type, ModuleType, str, bytes, bool, int, complex, torch.dtype, torch.device, type(None))
Place = tuple[str, object]


def owner_of(finish: Callable[[], None]) -> object:
    """The object whose work was put off."""
    return finish.__self__ if isinstance(finish, MethodType) else finish


def places(item: object) -> Iterator[tuple[Place, object]]:
    """What `item` holds: (where, what)."""
    if isinstance(item, dict):
        yield from ((("at", number), value) for number, value in enumerate(item.values()))
    elif isinstance(item, list | tuple | deque):
        yield from ((("at", number), value) for number, value in enumerate(item))
    elif isinstance(item, FunctionType):
        for number, cell in enumerate(item.__closure__ or ()):
            yield ("cell", number), _content(cell)
        yield ("defaults", 0), item.__defaults__
        yield ("defaults", 1), item.__kwdefaults__
        yield from _attributes(item)
    elif isinstance(item, MethodType):
        yield ("of", 0), item.__self__
    elif isinstance(item, partial):
        yield from (
            (("part", number), value)
            for number, value in enumerate((item.func, item.args, item.keywords))
        )
    else:
        yield from _attributes(item)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _attributes(item: object) -> Iterator[tuple[Place, object]]:
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(item, name):
                yield ("slot", name), getattr(item, name)
    names = getattr(item, "__dict__", None)
    if isinstance(names, dict):
        yield from ((("name", name), value) for name, value in names.items())


def reached(root: object, stop: set[int]) -> Iterator[object]:
    """Everything `root` holds, itself included; not what only those in `stop` (ids) hold, which
    are told themselves."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _PLAIN):
            continue
        seen.add(id(item))
        yield item
        is_end = isinstance(item, (torch.Tensor, float, *_SHARED))
        if is_end or (id(item) in stop and item is not root):
            continue
        stack += [value for _, value in places(item)]


def side_by_side(
    live: object, shadow: object
) -> Iterator[tuple[torch.Tensor | float, torch.Tensor | float]]:
    """The tensors, and the numbers with a fraction, that lie at the same places in both. What one
    has and the other lacks is passed over, and so is what both share."""
    seen: set[int] = set()
    stack = [(live, shadow)]
    while stack:
        one, other = stack.pop()
        if one is other or id(other) in seen or isinstance(other, _PLAIN + _SHARED):
            continue
        if type(one) is not type(other):
            continue
        if isinstance(other, torch.Tensor | float):
            assert isinstance(one, torch.Tensor | float)
            yield one, other
            continue
        seen.add(id(other))
        if isinstance(one, FunctionType) and one.__code__ is not _code(other):
            continue
        there = dict(places(one))
        stack += [(there[place], value) for place, value in places(other) if place in there]


def _code(function: object) -> object:
    assert isinstance(function, FunctionType)
    return function.__code__

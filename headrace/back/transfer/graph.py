"""What an object holds, place by place; and two objects of the same making, walked side by side.

Layers keep weights in attributes, containers, bound methods and the closures of kernels. Where each
lies is the same in two models that were built alike, so that a walk over both finds which tensor of
one is which of the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType

import torch

from headrace.back.kernels.op import Kernel, Op
from headrace.back.layers.adapted_table import AdaptedTable
from headrace.back.layers.adapters import AdaptedLinear, AdapterSlots
from headrace.back.layers.moe.adapted import AdaptedExperts
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.parallel.mesh import Axis, Mesh

_SLOTS = (AdapterSlots, AdaptedLinear, AdaptedTable, AdaptedExperts)
_SHARED = (Scope, Ledger, Mesh, Axis, *_SLOTS, Op, Kernel)
"""What layers share with others, and what holds no weight of theirs."""
_PLAIN = (type, ModuleType, str, bytes, bool, int, complex, torch.dtype, torch.device, type(None))
_ENDS = (torch.Tensor, float, *_SHARED)
_PASSED = _PLAIN + _SHARED
_CHILDLESS = frozenset({str, bytes, bool, int, complex, torch.dtype, torch.device, type(None)})
"""Most of what layers hold: looked up by the type alone, as the walks over a model are long."""
_TOOLS = frozenset({"ctypes", "triton", "threading", "_thread", "pathlib", "enum"})
"""Packages whose objects hold no weights, but much else: a library's functions, a kernel's
sources."""
Place = tuple[str, object]


def owner_of(finish: Callable[[], None]) -> object:
    """The object whose work was put off."""
    return finish.__self__ if isinstance(finish, MethodType) else finish


def places(item: object) -> list[tuple[Place, object]]:
    """What `item` holds: (where, what), but for what cannot hold anything itself."""
    if isinstance(item, dict):
        held = _numbered("at", item.values())
    elif isinstance(item, list | tuple | deque):
        held = _numbered("at", item)
    elif isinstance(item, FunctionType):
        held = _numbered("cell", [_content(cell) for cell in item.__closure__ or ()])
        held += _numbered("defaults", (item.__defaults__, item.__kwdefaults__))
        held += _attributes(item)
    elif isinstance(item, MethodType):
        held = [(("of", 0), item.__self__)]
    elif isinstance(item, partial):
        held = _numbered("part", (item.func, item.args, item.keywords))
    else:
        held = _attributes(item)
    return held


def _numbered(kind: str, values: Iterable[object]) -> list[tuple[Place, object]]:
    return [((kind, i), one) for i, one in enumerate(values) if type(one) not in _CHILDLESS]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _attributes(item: object) -> list[tuple[Place, object]]:
    if _is_tool(type(item)):
        return []
    held: list[tuple[Place, object]] = [
        (("slot", name), getattr(item, name))
        for name in _slots_of(type(item))
        if hasattr(item, name)
    ]
    names = getattr(item, "__dict__", None)
    if isinstance(names, dict):
        held += [
            (("name", name), value)
            for name, value in names.items()
            if type(value) not in _CHILDLESS
        ]
    return held


@cache
def _is_tool(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _TOOLS


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


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
        if isinstance(item, _ENDS) or (id(item) in stop and item is not root):
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
        if one is other or id(other) in seen or isinstance(other, _PASSED):
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

"""Triton's interpreter, quicker: what it works out anew at every operation inside a kernel is kept.

At each `tl.sum` it lists the members of triton.language to exchange the builtins among them, and for each tensor it
makes the type and the shape; both took more than half of all the time of the tests. What is exchanged and made is the
same. A reduction by a function of ours is worked out element by element.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter


@cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    members = inspect.getmembers(owner)
    return [(name, member) for name, member in members if core.is_builtin(member)]


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:
            interpreter._patch_attr(owner, name, member, builder, scope)


class _Scope(interpreter._LangPatchScope):
    """What a kernel, and the functions inside it, have exchanged until it ends."""

    done: set[str] = set()

    def restore(self) -> None:
        super().restore()
        self.done.clear()


@cache
def _languages(function: Any) -> frozenset[str]:
    found = [value for value in function.__globals__.values() if inspect.ismodule(value)]
    return frozenset(module.__name__ for module in found if module in (language, core))


_patch_language = interpreter._patch_lang


def _patch_lang(function: Any) -> Any:
    if _languages(function) <= _Scope.done:
        return _Scope()
    _Scope.done.update(_languages(function))
    return _patch_language(function)


_np_dtype = interpreter._get_np_dtype
_np_dtype_of_elements = cache(_np_dtype)


def _get_np_dtype(kind: Any) -> Any:
    element = kind.scalar
    return _np_dtype_of_elements(element) if type(element) is core.dtype else _np_dtype(kind)


_make_block = core.block_type.__init__
_blocks: dict[Any, dict[str, Any]] = {}


def _init_block(self: Any, element: Any, shape: Any) -> None:
    if type(element) is not core.dtype or type(shape) not in (list, tuple, core.tuple):
        return _make_block(self, element, shape)
    key = element.name, *(size.value if type(size) is core.constexpr else size for size in shape)
    if key in _blocks:
        self.__dict__ = _blocks[key]
    else:
        _make_block(self, element, shape)
        _blocks[key] = self.__dict__
    return None


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    facts = vars(kind)
    if "told" not in facts:
        sizes = kind.shape if kind.is_block() else ()
        facts["told"] = (
            core.tuple([core.constexpr(size) for size in sizes]),
            core.constexpr(math.prod(sizes)),
        )
    self.shape, self.numel = facts["told"]


def _reduce_by_halves(self: Any, input: Any) -> Any:
    """Combines every second element with the one behind it until one is left, all in one call: the interpreter calls
    the function of a `tl.reduce` for each element. An axis's size is a power of two."""
    tensors, axis = self.unravel(input, self.axis)
    rank = len(tensors[0].handle.data.shape)
    while (size := tensors[0].handle.data.shape[axis]) > 1:
        parts = []
        for begin in (0, 1):
            every_second = tuple(
                slice(begin if i == axis else 0, None, 1 + (i == axis)) for i in range(rank)
            )
            parts += [self.to_tensor(one.handle.data[every_second], one.dtype) for one in tensors]
        assert size % 2 == 0, size
        combined = self.combine_fn.fn(*parts)
        tensors = combined if isinstance(combined, tuple) else (combined,)
    if self.keep_dims:
        assert self.axis is not None
        return list(tensors)
    left = [one.handle.data.squeeze(axis) for one in tensors]
    return [
        self.to_tensor(data if data.shape else data.item(), one.dtype)
        for data, one in zip(left, tensors, strict=True)
    ]


def quicken() -> None:
    """For this process, before the first kernel is interpreted."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._LangPatchScope = _Scope
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    core.block_type.__init__ = _init_block
    core.tensor.__init__ = _init_tensor
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves

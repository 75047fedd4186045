"""Triton's interpreter, quicker: what it works out anew at every operation inside a kernel is kept.

At each `tl.sum` it lists the members of triton.language to exchange the builtins among them, for each tensor it makes
the type and the shape, and it compares types by name and shapes as tuples of its own; this took two thirds of all the
time of the tests. What is exchanged and made is the same. A reduction by a function of ours is worked out element by
element.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


@cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    members = inspect.getmembers(owner)
    return [(name, member) for name, member in members if core.is_builtin(member)]


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:
            scope.set_attr(owner, name, _inside(member))


@cache
def _inside(member: Any) -> Any:
    """The builtin, told that the interpreter runs it; without its own check that somebody says so."""
    inner = member.__wrapped__ if member.__code__ is _OUTER else member

    def called(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*arguments, **named)

    return called


_OUTER = core.builtin(len).__code__
"""What `builtin` wraps around functions."""


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


_patch_tensor = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes an array of one number for the number, which NumPy 2.5 does not."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


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
        # A copy: Python 3.13.0 empties the first one's own with the first one.
        _blocks[key] = self.__dict__ = dict(vars(self))


def _with_element(self: Any, element: Any) -> Any:
    if type(element) is not core.dtype:
        return core.block_type(element, self.shape)
    made = vars(self).setdefault("made", {})
    if (found := made.get(element)) is None:
        found = made[element] = core.block_type(element, self.shape)
    return found


_unwrap = core._unwrap_if_constexpr
_PLAIN = {int, bool, float, core.dtype, type(None)}


def _unwrap_if_constexpr(value: Any) -> Any:
    kind = type(value)
    return value if kind in _PLAIN else value.value if kind is core.constexpr else _unwrap(value)


_same = core.dtype.__eq__


def _same_type(self: Any, other: Any) -> bool:
    return self is other or _same(self, other)


_broadcast = semantic.TritonSemantic.broadcast_impl_value


def _broadcast_values(self: Any, left: Any, right: Any) -> Any:
    """Of two scalars, or of two blocks of one shape, nothing is to be done."""
    if left.type.is_block() == right.type.is_block() and _sizes(left.type) == _sizes(right.type):
        return left, right
    return _broadcast(self, left, right)


def _sizes(kind: Any) -> Any:
    """A block's as a tuple of Python's; none of a scalar."""
    if not kind.is_block():
        return ()
    facts = vars(kind)
    if "sizes" not in facts:
        facts["sizes"] = tuple(_unwrap_if_constexpr(size) for size in kind.shape)
    return facts["sizes"]


_check_types = semantic.TritonSemantic.binary_op_type_checking_impl


def _checked_types(self: Any, left: Any, right: Any, *choices: Any, **named: Any) -> Any:
    """Of two tensors of one plain type nothing is converted, but before a division."""
    if type(left) is type(right) is core.tensor and not named.get("div_or_mod", len(choices) > 3):
        kind = left.type.scalar
        if kind is right.type.scalar and type(kind) is core.dtype:
            return self.broadcast_impl_value(left, right)
    return _check_types(self, left, right, *choices, **named)


_constant = semantic.TritonSemantic.scalar_constant
_constants: dict[Any, Any] = {}


def _scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
    """Nothing writes into a tensor's numbers."""
    if type(value) not in (int, bool, float) or type(dtype) is not core.dtype:
        return _constant(self, value, dtype)
    key = type(value), value, dtype.name
    if (found := _constants.get(key)) is None:
        found = _constants[key] = _constant(self, value, dtype)
    return found


_block_to_ir = core.block_type.to_ir


def _to_ir(self: Any, builder: Any) -> Any:
    """The interpreter's type of a block, once."""
    facts = vars(self)
    if "ir" not in facts:
        facts["ir"] = _block_to_ir(self, builder)
    return facts["ir"]


def _check_no_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
    """Twelve operations whose result is asked for by a builder with `debug` alone, which the interpreter's is not."""


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
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._get_np_dtype = _get_np_dtype
    core.block_type.__init__ = _init_block
    core.block_type.with_element_ty = _with_element
    core._unwrap_if_constexpr = _unwrap_if_constexpr
    core.dtype.__eq__ = _same_type
    semantic.TritonSemantic.broadcast_impl_value = _broadcast_values
    core.block_type.to_ir = _to_ir
    semantic.TritonSemantic.binary_op_type_checking_impl = _checked_types
    semantic.TritonSemantic.scalar_constant = _scalar_constant
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _check_no_overflow
    core.tensor.__init__ = _init_tensor
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves

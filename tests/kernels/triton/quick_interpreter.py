"""Triton's interpreter, quicker: what it works out anew at every call of a function inside a kernel is kept.

It lists the members of triton.language at each `tl.sum` to exchange the builtins among them, which took half of all the
time of the tests; here the list is made once, and what is exchanged is the same.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton import language
from triton.runtime import interpreter


@cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    members = inspect.getmembers(owner)
    return [(name, member) for name, member in members if language.core.is_builtin(member)]


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:
            interpreter._patch_attr(owner, name, member, builder, scope)


_np_dtype = interpreter._get_np_dtype
_np_dtype_of_elements = cache(_np_dtype)


def _get_np_dtype(kind: Any) -> Any:
    element = kind.scalar
    return _np_dtype_of_elements(element) if type(element) is language.dtype else _np_dtype(kind)


def quicken() -> None:
    """For this process, before the first kernel is interpreted."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype

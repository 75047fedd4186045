"""Runs Gluon kernels on tensors of the host by the values of their operations: what a kernel computes does not depend
on where its layouts put it (that these fit, the compiler checks). No interpreter of Triton knows Gluon.

Knows the operations of linear_int4/triton_rows_int4.py.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from tests.kernels.triton.ptx import run

TYPES = {
    gl.float32: torch.float32,
    gl.bfloat16: torch.bfloat16,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
}


class Value:
    """A tensor of a kernel."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def to(self, dtype: gl.dtype, bitcast: bool = False) -> Value:
        wanted = TYPES[dtype]
        return Value(self.data.contiguous().view(wanted) if bitcast else self.data.to(wanted))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(list(shape)))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.data.permute(*order))

    def expand_dims(self, axis: int) -> Value:
        return Value(self.data.unsqueeze(axis))

    def __getitem__(self, place: Any) -> Value:
        return Value(self.data[place])

    def __neg__(self) -> Value:
        return Value(-self.data)


def _binary(name: str) -> Callable[[Value, Any], Value]:
    def of(self: Value, other: Any) -> Value:
        other = other.data if isinstance(other, Value) else other
        return Value(getattr(self.data, name)(other))

    return of


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "radd", "rsub", "rmul", "rtruediv", "rand",
              "lt", "le", "gt", "ge", "eq", "ne"):  # fmt: skip
    setattr(Value, f"__{_name}__", _binary(f"__{_name}__"))


class Pointer:
    """Into a tensor, at places that are counted in elements."""

    def __init__(self, base: torch.Tensor, places: Any = 0) -> None:
        self.base, self.places = base, places

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, more + self.places)


class Shared:
    """Shared memory; nothing was written to it before."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, place: int) -> Shared:
        return Shared(self.data[place])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(*order))

    def store(self, value: Value) -> None:
        assert self.data.shape == value.data.shape and self.data.dtype == value.data.dtype
        self.data.copy_(value.data)

    def load(self, layout: object) -> Value:
        return Value(self.data.clone())


class Language:
    """Gluon's, for one program; what is not here is its own."""

    static_range = staticmethod(range)

    def __init__(self, program: int) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)

    def program_id(self, axis: int) -> int:
        return self._program

    def arange(self, start: int, stop: int, layout: object) -> Value:
        return Value(torch.arange(start, stop))

    def zeros(self, shape: list[int], dtype: gl.dtype, layout: object) -> Value:
        return Value(torch.zeros(shape, dtype=TYPES[dtype]))

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0) -> Value:
        places = pointer.places.data
        here = torch.as_tensor(getattr(mask, "data", mask)).expand(places.shape)
        flat = pointer.base.reshape(-1)
        found = flat[places.where(here, 0)]
        return Value(found.where(here, torch.tensor(other, dtype=found.dtype)))

    def store(self, pointer: Pointer, value: Value, mask: Value) -> None:
        pointer.base.view(-1)[pointer.places.data[mask.data]] = value.data[mask.data]

    def where(self, condition: Any, one: Any, two: Any) -> Any:
        if isinstance(condition, bool):
            return one if condition else two
        parts = (getattr(part, "data", part) for part in (one, two))
        return Value(torch.where(condition.data, *parts))

    def sum(self, value: Value, axis: int) -> Value:
        return Value(value.data.sum(axis))

    def join(self, one: Value, two: Value) -> Value:
        return Value(torch.stack((one.data, two.data), -1))

    def broadcast(self, one: Value, two: Value) -> tuple[Value, ...]:
        return tuple(map(Value, torch.broadcast_tensors(one.data, two.data)))

    def convert_layout(self, value: Value, layout: object, assert_trivial: bool = False) -> Value:
        return value

    def rsqrt(self, value: Value) -> Value:
        return Value(value.data.rsqrt())

    def exp(self, value: Value) -> Value:
        return Value(value.data.exp())

    def allocate_shared_memory(self, dtype: gl.dtype, shape: list[int], layout: object) -> Shared:
        return Shared(torch.full(shape, torch.nan, dtype=TYPES[dtype]))

    def inline_asm_elementwise(
        self,
        lines: str,
        constraints: str,
        values: list[Value],
        dtype: Any,
        is_pure: bool,
        pack: int,
    ) -> Any:
        """Of two neighbours at a time, those of 16 bits in one register."""
        assert pack == 2
        count = len(dtype) if isinstance(dtype, tuple) else 1
        registers: dict[str, torch.Tensor] = {}
        for value in values:
            data = value.data.contiguous()
            parts = (
                [data.view(torch.int32)]
                if data.dtype is torch.int16
                else data.unflatten(-1, (-1, 2)).unbind(-1)
            )
            for part in parts:
                registers[f"${count + len(registers)}"] = part
        run(lines, registers)
        outs = [Value(registers[f"${i}"].contiguous().view(torch.int16)) for i in range(count)]
        return tuple(outs) if isinstance(dtype, tuple) else outs[0]


def _mma_v2(one: Value, two: Value, total: Value) -> Value:
    return Value(total.data + one.data.float() @ two.data.float())


def _bound(function: Callable[..., Any], language: Language) -> Callable[..., Any]:
    """The function with what it names taken from here."""
    names: dict[str, Any] = {}
    known = {
        "gl": language,
        "mma_v2": _mma_v2,
        "enter": lambda *_: None,
        "thread_barrier": lambda: None,
    }
    body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    for name, one in function.__globals__.items():
        if name in known:
            names[name] = known[name]
        elif (
            isinstance(one, JITFunction)
            and one.fn is not function
            and name in function.__code__.co_names
        ):
            names[name] = _bound(one.fn, language)
        else:
            names[name] = one.value if isinstance(one, gl.constexpr) else one
    names["__builtins__"] = __builtins__
    return body


def run_kernel(kernel: JITFunction, programs: int, *tensors: Any, **constants: Any) -> None:
    """All programs, one after the other."""
    values = [Pointer(one) if isinstance(one, torch.Tensor) else one for one in tensors]
    for program in range(programs):
        _bound(kernel.fn, Language(program))(*values, **constants)

"""GEMMs of many tokens with a quantized weight that becomes floats as a whole before each: one
buffer of a device for all layers, then the library's GEMM, or ours with the activation inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.linear.triton_small import Gemm, Launch, small


class QuantizedWeight(Protocol):
    """A weight [O, I]."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


W = TypeVar("W", bound=QuantizedWeight)


@dataclass(eq=False)
class Dequantized:
    """Where the weights of a device are dequantized, one after the other."""

    values: torch.Tensor

    def part(self, weight: QuantizedWeight) -> torch.Tensor:
        """Room for one [O, I]."""
        return self.values[: weight.outputs * weight.inputs].view(weight.outputs, weight.inputs)


_rooms: WeakValueDictionary[tuple[torch.device, torch.dtype], Dequantized] = WeakValueDictionary()


def room_for(weight: QuantizedWeight, dtype: torch.dtype) -> Dequantized:
    """The device's, grown to hold this weight; nothing is multiplied before all are bound."""
    device, count = weight.device, weight.outputs * weight.inputs
    room = _rooms.get((device, dtype))
    if room is None:
        room = _rooms[device, dtype] = Dequantized(torch.empty(count, dtype=dtype, device=device))
    elif len(room.values) < count:
        room.values = torch.empty(count, dtype=dtype, device=device)
    return room


def bind_dequantized(
    weight: W,
    dequantize_into: Callable[[W, torch.Tensor], None],
    bias_O: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    activation: GatedActProblem | None,
    add: bool,
    wide: bool,
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """The GEMM with the dequantized weight, and what comes after it: f(x_TI, residual_TY | None) ->
    y_TY."""
    room = room_for(weight, dtype)
    activate = None if activation is None else triton_gated_act.bind(activation)

    @cache
    def launch_for() -> Callable[[int], Launch | None]:
        name = "" if activation is None else activation.activation
        gemm = Gemm(weight_OI=room.part(weight), bias_O=bias_O, activation=name, add=add)
        return small(gemm, fresh=True)

    def many(x_TI: torch.Tensor, residual_TY: torch.Tensor | None) -> torch.Tensor:
        weight_OI = room.part(weight)
        dequantize_into(weight, weight_OI)
        run = launch_for()(len(x_TI)) if activate is not None else None
        if run is not None:
            y_TY = x_TI.new_empty(len(x_TI), weight.outputs // 2)
            run(x_TI, y_TY)
            return y_TY
        if residual_TY is not None and bias_O is None:
            return residual_TY.addmm_(x_TI, weight_OI.t())
        y_TY = F.linear(x_TI, weight_OI, bias_O)
        if wide:
            return y_TY.float()
        if activate is not None:
            y_TY = activate(y_TY)
        return y_TY if residual_TY is None else residual_TY.add_(y_TY)

    return many

"""The tensors that an object holds, and the bytes under them: layers, closures of bound kernels and
descriptors share them, so that whoever moves weights has to find them all."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import torch


def tensors_of(root: object, *, without: Iterable[object] = ()) -> Iterator[torch.Tensor]:
    """Every tensor that `root` can reach through attributes, containers and closures; not through a
    function's globals, modules and classes, which are not its own, nor through `without`."""
    seen = {id(item) for item in without}
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, FunctionType):
            stack += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        else:
            stack += gc.get_referents(item)


ALIGNMENT = 512
"""Bytes between the beginnings of tensors, as the device's allocator has it: transfers, TMA and
vector loads want it."""


def room_of(num_bytes: int) -> int:
    """What a copy of so many bytes takes beside others."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def bytes_of(storage: torch.UntypedStorage, device: torch.device, count: int) -> torch.Tensor:
    """The first `count` bytes of a storage on `device`, uint8 [count]; no copy."""
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (count,), (1,))

"""Whether kernels are launched. While many are compiled ahead none is, and what they would have
written holds whatever it held: who reads memory at an index that a kernel gave has to ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_state = [True]


def are_launched() -> bool:
    """False while kernels are only compiled."""
    return _state[-1]


def written(index: torch.Tensor) -> torch.Tensor:
    """Indices that a kernel gave, or zeros where it was not launched."""
    return index if are_launched() else torch.zeros_like(index)


@contextmanager
def without_launches() -> Iterator[None]:
    """Within it `are_launched` says no. One thread compiles and runs steps meanwhile."""
    _state.append(False)
    try:
        yield
    finally:
        _state.pop()

"""Whether kernels are launched. While many are compiled ahead none is, and what they would have
written holds whatever it held: who reads memory at an index that a kernel gave has to ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_state = [True]


def are_launched() -> bool:
    """False while kernels are only compiled."""
    return _state[-1]


@contextmanager
def without_launches() -> Iterator[None]:
    """Within it `are_launched` says no. One thread compiles and runs steps meanwhile."""
    _state.append(False)
    try:
        yield
    finally:
        _state.pop()

"""Whether kernels are launched. While many are compiled ahead none is, and what they would have
written holds zeros: a step allocates it within `without_launches`, and PyTorch's own operations
behind a kernel (gathers, writes to the KV cache) may take it as an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_state = [True]
_ALLOCATIONS = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    }
)


def are_launched() -> bool:
    """False while kernels are only compiled."""
    return _state[-1]


@contextmanager
def without_launches() -> Iterator[None]:
    """Within it `are_launched` says no, and new memory holds zeros. One thread compiles and runs
    steps meanwhile."""
    _state.append(False)
    try:
        with _Zeroed():
            yield
    finally:
        _state.pop()


class _Zeroed(TorchFunctionMode):
    """Tensors that are allocated and left as they are hold zeros."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _ALLOCATIONS else result

"""One CUDA graph: recording it, and its outputs without the memory's ownership."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture(
    work: Callable[[], Result], stream: torch.cuda.Stream, pool: tuple[int, int]
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the kernels that `work` launches, recorded on `stream`, with what it returns:
    nothing is executed. RuntimeError where the work waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = work()
        except BaseException:
            with suppress(RuntimeError):  # says only that the recording is broken
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, outputs


class _Alias:
    """The memory of a tensor without owning it, as `__cuda_array_interface__` describes it."""

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": kind,
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


_KINDS = {8: "<i8", 4: "<i4", 2: "<i2", 1: "|i1"}


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A view that does not keep the memory: valid as long as its graph is."""
    assert tensor.is_contiguous(), tensor.shape
    alias = _Alias(tensor, _KINDS[tensor.element_size()])
    return torch.as_tensor(alias, device=tensor.device).view(tensor.dtype)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Freeing a tensor of another stream by chance would break the recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

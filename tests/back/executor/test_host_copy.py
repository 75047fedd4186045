"""Weights into host memory and back: every tensor over them is what it was, whoever holds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from headrace.back.executor.host_copy import HostCopy, tensors_of

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


class Layer:
    """Holds its weight in every way that layers do: an attribute, a closure's cell, a default, a bound argument, a view
    in a container."""

    __slots__ = ("apply", "bound", "hidden", "parts", "whole")

    def __init__(self, weight: torch.Tensor) -> None:
        kept = weight.clone() * 2

        def apply(x: torch.Tensor, *, scale: torch.Tensor = weight.sum().clone()) -> torch.Tensor:
            return x @ kept * scale

        self.whole = weight
        self.parts = {"rows": (weight[1:], weight.T)}
        self.apply: Callable[[torch.Tensor], torch.Tensor] = apply
        self.bound = partial(torch.mul, weight.clone() + 1)
        self.hidden = torch.nn.Linear(3, 3, device=weight.device)


def results(layer: Layer) -> list[torch.Tensor]:
    x = torch.ones(2, layer.whole.shape[0], device=layer.whole.device)
    rows, turned = layer.parts["rows"]
    found = [layer.whole, rows, turned, layer.apply(x), layer.bound(layer.whole)]
    return [tensor.detach().clone() for tensor in (*found, layer.hidden.weight)]


@pytest.mark.parametrize("device", DEVICES)
def test_everything_a_model_can_reach_leaves_and_comes_back(device: str) -> None:
    layer = Layer(torch.randn(4, 4, device=device))
    before = results(layer)
    copy = HostCopy(layer, layer.whole.device)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors_of(layer)} == {0}
    copy.back()
    for was, is_now in zip(before, results(layer), strict=True):
        assert torch.equal(was, is_now)
    layer.whole[1, 0] = 7  # views share their memory as before
    assert layer.parts["rows"][0][0, 0] == 7 and layer.parts["rows"][1][0, 1] == 7


def test_memory_that_is_somebody_elses_stays() -> None:
    buffer = bytearray(b"\x01\x02\x03\x04")
    borrowed, own = torch.frombuffer(buffer, dtype=torch.uint8), torch.ones(3)
    copy = HostCopy([borrowed, own], CPU)
    assert copy.num_bytes == 12 and borrowed.tolist() == [1, 2, 3, 4]
    copy.back()
    assert own.tolist() == [1, 1, 1]


def test_globals_of_a_function_are_not_its_own() -> None:
    elsewhere = torch.ones(2)
    function = eval("lambda: elsewhere", {"elsewhere": elsewhere})
    assert list(tensors_of(function)) == []

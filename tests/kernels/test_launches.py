"""Whether kernels are launched is told while many are compiled alone, and what they would have written is zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from headrace.back.kernels.launches import are_launched, without_launches

LIKE = torch.ones(2, 3, dtype=torch.int32)


@pytest.fixture
def filled() -> Iterator[None]:
    """PyTorch fills new memory with the greatest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_it_is_told_within_and_ends_with_an_error() -> None:
    assert are_launched()
    with pytest.raises(RuntimeError), without_launches():
        assert not are_launched()
        raise RuntimeError
    assert are_launched()


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(6, dtype=torch.int64),
        lambda: torch.empty(2, 3, dtype=torch.int32),
        lambda: torch.empty_like(LIKE),
        lambda: torch.empty_strided((2, 3), (3, 1), dtype=torch.int32),
        lambda: LIKE.new_empty(2, 3),
        lambda: LIKE.new_empty_strided((2, 3), (3, 1)),
    ],
)
def test_what_no_kernel_wrote_is_an_index(
    allocate: Callable[[], torch.Tensor], filled: None
) -> None:
    assert int(allocate().max()) > 1 << 30
    with without_launches():
        index = allocate().flatten()
        assert torch.arange(4.0).index_select(0, index).tolist() == [0.0] * 6
    assert int(allocate().max()) > 1 << 30

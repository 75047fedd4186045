"""Whether kernels are launched is told while many are compiled alone."""

from __future__ import annotations

import pytest

from headrace.back.kernels.launches import are_launched, without_launches


def test_it_is_told_within_and_ends_with_an_error() -> None:
    assert are_launched()
    with pytest.raises(RuntimeError), without_launches():
        assert not are_launched()
        raise RuntimeError
    assert are_launched()

"""Weights of any sizes into host memory and back. A file of its own: machines with a GPU lack Hypothesis."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.back.executor.host_copy import HostCopy
from tests.back.executor.test_host_copy import CPU


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.booleans())
def test_any_sizes_come_back_bit_by_bit(sizes: list[int], shared: bool) -> None:
    base = torch.arange(sum(sizes), dtype=torch.int16)
    pieces = list(base.split(sizes)) if shared else [one.clone() for one in base.split(sizes)]
    copy = HostCopy(pieces, CPU)
    assert copy.num_bytes == base.nbytes
    copy.back()
    assert torch.equal(torch.cat(pieces), base)

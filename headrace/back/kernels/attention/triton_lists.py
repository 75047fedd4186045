"""Lists of work that kernels make on the device once a step, for all layers that share a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch

from headrace.back.kernels.attention.op import Plan

ROW_BUCKETS = (16, 64, 256, 1024, 4096)
"""Rows a program reads; few sizes, so that few kernels are compiled."""

Launch = Callable[[torch.Tensor, torch.Tensor, Plan, torch.Tensor], None]
"""f(q_THD, kv, plan, out_THD)"""


def row_bucket(num_rows: int) -> int:
    """How many rows a program reads."""
    return next(size for size in ROW_BUCKETS if size >= num_rows)


class PlanLists:
    """The lists of the plans in use. The first layer that asks for a plan makes its list, and makes it anew
    whenever it asks again (the next step, or the same step while it is captured); the layers after it read it."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, tuple[object, torch.Tensor]] = {}

    def get(
        self, plan: Plan, sizes: Hashable, owner: object, make: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """The list, and whether it was made for this call."""
        key = (id(plan), sizes)
        maker, pieces = self._lists.get(key, (owner, None))
        if maker is not owner and pieces is not None:
            return pieces, False
        if pieces is None:
            weakref.finalize(plan, self._lists.pop, key, None)
        pieces = make()
        self._lists[key] = (owner, pieces)
        return pieces, True


lists = PlanLists()

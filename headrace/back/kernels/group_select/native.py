"""Groups chosen by an indexer's scores, by the native kernel: no sort, and nothing scored where all
is chosen."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.group_select.op import GroupSelect, GroupSelectProblem
from headrace.back.kernels.native import selection
from headrace.back.kernels.native.library import INT32, INT64, NativeLibrary, loaded
from headrace.back.kernels.op import Kernel

_ARGUMENTS = (*selection.ARGUMENTS, INT64, INT64, INT32, INT32)


def bind_with(library: NativeLibrary, problem: GroupSelectProblem) -> GroupSelect:
    """The kernel of one library."""
    kernel, best_key = library.bind("group_select", *_ARGUMENTS), int(problem.best_key)

    def group_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, entries: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        own, lists = (problem.group, problem.local, best_key), (problem.lists,)
        return selection.launch(kernel, problem, q_TJI, weight_TJ, entries, plan, *own, lists=lists)

    return group_select


KERNEL = Kernel(
    name="native",
    supports=selection.supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

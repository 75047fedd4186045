"""Positions chosen by an indexer's scores, by the native kernel: no sort, and nothing scored where
all is chosen."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.index_select.op import IndexSelect, IndexSelectProblem
from headrace.back.kernels.native import selection
from headrace.back.kernels.native.library import INT32, NativeLibrary, loaded
from headrace.back.kernels.op import Kernel


def bind_with(library: NativeLibrary, problem: IndexSelectProblem) -> IndexSelect:
    """The kernel of one library."""
    kernel = library.bind("index_select", *selection.ARGUMENTS, INT32)

    def index_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, keys: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        return selection.launch(kernel, problem, q_TJI, weight_TJ, keys, plan)

    return index_select


KERNEL = Kernel(
    name="native",
    supports=selection.supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

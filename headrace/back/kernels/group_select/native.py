"""Groups chosen by an indexer's scores, by the native kernel: no sort, and nothing scored where all
is chosen."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.group_select.op import GroupSelect, GroupSelectProblem
from headrace.back.kernels.native.library import (
    DTYPES,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

MAX_DIM = 512
_ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 13, INT32, INT32)


def bind_with(library: NativeLibrary, problem: GroupSelectProblem) -> GroupSelect:
    """The kernel of one library."""
    kernel, element = library.bind("group_select", *_ARGUMENTS), DTYPES[problem.dtype]
    heads, dim, top_k = problem.heads, problem.dim, problem.top_k

    def group_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, entries: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        assert q_TJI.dtype == weight_TJ.dtype == entries.dtype == problem.dtype
        assert q_TJI.shape[1:] == (heads, dim) and q_TJI.stride()[1:] == (dim, 1), q_TJI.stride()
        assert weight_TJ.shape == q_TJI.shape[:2] and weight_TJ.stride(1) == 1, weight_TJ.shape
        assert entries.stride()[1:] == (dim, 1), entries.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
        num_tokens, rows = q_TJI.shape[0], lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == rows, (starts.shape, table.shape)
        chosen_TGK = q_TJI.new_empty((num_tokens, problem.lists, top_k), dtype=torch.int32)
        tensors = (q_TJI, weight_TJ, entries, starts, lengths, table, chosen_TGK)
        kernel(
            *(tensor.data_ptr() for tensor in tensors), rows, table.stride(0), num_tokens, heads,
            dim, top_k, q_TJI.stride(0), weight_TJ.stride(0), problem.block_tokens,
            entries.shape[0], entries.stride(0), problem.group, problem.local,
            int(problem.best_key), element,
        )  # fmt: skip
        return chosen_TGK

    return group_select


def _supports(problem: GroupSelectProblem) -> str | None:
    if problem.dim > MAX_DIM:
        return f"keys of {problem.dim} are above {MAX_DIM}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem),
    invariant=True,
)

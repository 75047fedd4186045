"""What an indexer's native kernels have in common that choose keys by its scores: one key by itself
(index_select) or groups of them (group_select)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.native.library import DTYPES, INT64, POINTER, unsupported

MAX_DIM = 512
ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 11)
"""Of a kernel; its own follow, and the dtype (int32)."""


class SelectionProblem(Protocol):
    """What both problems state."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...


def supports(problem: SelectionProblem) -> str | None:
    """See Kernel."""
    if problem.dim > MAX_DIM:
        return f"keys of {problem.dim} are above {MAX_DIM}"
    return unsupported(problem.device, problem.dtype)


def launch(
    kernel: Callable[..., None],
    problem: SelectionProblem,
    q_TJI: torch.Tensor,
    weight_TJ: torch.Tensor,
    keys: torch.Tensor,
    plan: Plan,
    *more: int,
    lists: tuple[int, ...] = (),
) -> torch.Tensor:
    """Checks the shapes and runs the kernel with `more` of its own: int32 [T, *lists, top_k]."""
    heads, dim, top_k = problem.heads, problem.dim, problem.top_k
    assert q_TJI.dtype == weight_TJ.dtype == keys.dtype == problem.dtype
    assert q_TJI.shape[1:] == (heads, dim) and q_TJI.stride()[1:] == (dim, 1), q_TJI.stride()
    assert weight_TJ.shape == q_TJI.shape[:2] and weight_TJ.stride(1) == 1, weight_TJ.shape
    assert keys.stride()[1:] == (dim, 1), keys.stride()
    starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
    assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
    num_tokens, rows = q_TJI.shape[0], lengths.shape[0]
    assert starts.shape[0] == rows + 1 and table.shape[0] == rows, (starts.shape, table.shape)
    chosen = q_TJI.new_empty((num_tokens, *lists, top_k), dtype=torch.int32)
    tensors = (q_TJI, weight_TJ, keys, starts, lengths, table, chosen)
    kernel(
        *(tensor.data_ptr() for tensor in tensors), rows, table.stride(0), num_tokens, heads, dim,
        top_k, q_TJI.stride(0), weight_TJ.stride(0), problem.block_tokens, keys.shape[0],
        keys.stride(0), *more, DTYPES[problem.dtype],
    )  # fmt: skip
    return chosen

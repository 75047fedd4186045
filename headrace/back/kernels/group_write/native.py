"""The entries of groups by the native kernel: each is made by the last of its tokens."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.group_write.op import GroupWrite, GroupWriteProblem
from headrace.back.kernels.native.library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

MAX_WIDTH, MAX_GROUP = 4096, 4096
_ARGUMENTS = (*(POINTER,) * 9, *(INT64,) * 15, FLOAT, *(INT32,) * 3)


def bind_with(
    library: NativeLibrary,
    problem: GroupWriteProblem,
    bias_GX: torch.Tensor | None,
    weight_I: torch.Tensor | None,
) -> GroupWrite:
    """The kernel of one library; keeps the bias and the weight."""
    assert (weight_I is not None) == (problem.eps is not None), problem
    assert (bias_GX is not None) == problem.gated, problem
    kernel, element = library.bind("group_write", *_ARGUMENTS), DTYPES[problem.dtype]
    bias_GX, weight_I = (
        None if one is None else one.float().contiguous() for one in (bias_GX, weight_I)
    )
    width, rotary = problem.width, problem.rotary
    sizes = (width, problem.group, problem.series, rotary, problem.offset)
    assert bias_GX is None or bias_GX.shape == (problem.group, problem.series * width)
    assert weight_I is None or weight_I.shape == (width,)
    pairs = int(problem.layout == "pairs")

    def group_write(
        tokens: torch.Tensor,
        entries: torch.Tensor,
        table_PR: torch.Tensor,
        plan: Plan,
        entry_plan: Plan,
    ) -> None:
        assert tokens.dtype == entries.dtype == problem.dtype, (tokens.dtype, entries.dtype)
        assert tokens.stride()[1:] == (problem.token_width, 1), tokens.stride()
        assert entries.stride()[1:] == (width, 1), entries.stride()
        assert not rotary or (table_PR.is_contiguous() and table_PR.shape[1] == rotary)
        assert not rotary or table_PR.dtype == torch.float32, table_PR.dtype
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        entry_table = entry_plan.block_table_RB
        whole = (starts, lengths, table, entry_table)
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in whole)
        rows = lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == entry_table.shape[0] == rows
        kernel(
            tokens.data_ptr(), entries.data_ptr(), table_PR.data_ptr(),
            None if bias_GX is None else bias_GX.data_ptr(),
            None if weight_I is None else weight_I.data_ptr(),
            *(tensor.data_ptr() for tensor in whole), rows, plan.slot_T.shape[0], table.stride(0),
            entry_table.stride(0), tokens.shape[0], entries.shape[0], problem.block_tokens,
            tokens.stride(0), entries.stride(0), table_PR.shape[0], *sizes, problem.eps or 0.0,
            int(problem.gated), pairs, element,
        )  # fmt: skip

    return group_write


def _supports(problem: GroupWriteProblem) -> str | None:
    if problem.width > MAX_WIDTH or problem.group > MAX_GROUP:
        return f"entries of {problem.width} of {problem.group} tokens are above {MAX_WIDTH} of {MAX_GROUP}"
    if problem.series > 2 or (problem.series == 2 and not problem.gated):
        return (
            f"does not know {problem.series} series {'with' if problem.gated else 'without'} gates"
        )
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)

"""The inputs of a step by the native kernel: one call for what takes some thirty operations of
torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_inputs.op import (
    StepInputs,
    StepInputsProblem,
    StepOut,
    StepTables,
)

_ARGUMENTS = (*(POINTER,) * 13, *(INT64,) * 7)


def bind_with(library: NativeLibrary, problem: StepInputsProblem) -> StepInputs:
    """The kernel of one library."""
    kernel = library.bind("step_inputs", *_ARGUMENTS)
    max_rows, sizes = problem.max_rows, _group_sizes(problem)

    def step_inputs(words: torch.Tensor, tables: StepTables, out: StepOut) -> None:
        tokens_MC, blocks_GMB = tables.tokens_MC, tables.blocks_GMB
        groups, rows, columns = blocks_GMB.shape
        assert rows == tokens_MC.shape[0] == max_rows + 1, (rows, tokens_MC.shape, max_rows)
        assert words.numel() >= problem.updates_at + 2 * out.updates, (words.numel(), out.updates)
        outputs = (out.token_ids_T, out.positions_T, out.slots_GT, out.tables_GRB, out.last_R)
        assert all(tensor.is_contiguous() for tensor in (words, tokens_MC, blocks_GMB, *outputs))
        length = None if tables.length_M is None else tables.length_M.data_ptr()
        cross = None if tables.cross_M is None else tables.cross_M.data_ptr()
        kv_len = None if out.kv_len_R is None else out.kv_len_R.data_ptr()
        assert (length is None) == (kv_len is None), "lengths go in and out together"
        lengths = None if out.lengths_GR is None else out.lengths_GR.data_ptr()
        group_G2 = sizes(groups)
        kernel(
            words.data_ptr(), tokens_MC.data_ptr(), blocks_GMB.data_ptr(),
            *(tensor.data_ptr() for tensor in outputs), length, cross, kv_len,
            lengths, group_G2.data_ptr(), max_rows, tokens_MC.shape[1], groups, columns,
            out.token_ids_T.shape[0], out.last_R.shape[0], out.updates,
        )  # fmt: skip

    return step_inputs


def _group_sizes(problem: StepInputsProblem) -> Callable[[int], torch.Tensor]:
    """Tokens of a block and span of each group, int64 [G, 2]; recorded steps keep the address."""

    @cache
    def sizes(num_groups: int) -> torch.Tensor:
        groups = problem.groups_of(num_groups)
        return torch.tensor([(group.tokens, group.span) for group in groups], dtype=torch.int64)

    return sizes


KERNEL = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_with(loaded(), problem),
)

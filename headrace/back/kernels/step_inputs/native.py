"""The native kernels of a step's rows: its inputs, in one call for what takes some thirty
operations of torch; and behind it which drafts stand, and picked tokens into the rows and the
ring."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_commit.op import StepCommit
from headrace.back.kernels.step_inputs.op import (
    StepInputs,
    StepInputsProblem,
    StepOut,
    StepTables,
)
from headrace.back.kernels.step_verify.op import StepVerify

_INPUTS = (*(POINTER,) * 13, *(INT64,) * 7)
_VERIFY = (*(POINTER,) * 7, *(INT64,) * 5)
_COMMIT = (*(POINTER,) * 6, *(INT64,) * 5)


def bind_inputs(library: NativeLibrary, problem: StepInputsProblem) -> StepInputs:
    """The kernel of one library."""
    kernel = library.bind("step_inputs", *_INPUTS)
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


def bind_verify(library: NativeLibrary, problem: StepInputsProblem) -> StepVerify:
    """The kernel of one library."""
    kernel = library.bind("step_verify", *_VERIFY)
    max_rows = problem.max_rows

    def step_verify(
        words: torch.Tensor, token_T: torch.Tensor, value_T: torch.Tensor,
        tables: StepTables, count_M: torch.Tensor, ring_SXW: torch.Tensor,
    ) -> None:  # fmt: skip
        tokens_MC, length_M = tables.tokens_MC, tables.length_M
        assert length_M is not None and token_T.dtype == torch.int64, token_T.dtype
        assert value_T.dtype == torch.float32 and value_T.shape == token_T.shape, value_T.shape
        assert ring_SXW.shape[1] == 2 and ring_SXW.shape[2] >= token_T.shape[0], ring_SXW.shape
        assert all(t.is_contiguous() for t in (token_T, value_T, tokens_MC, count_M, ring_SXW))
        kernel(
            words.data_ptr(), token_T.data_ptr(), value_T.data_ptr(), tokens_MC.data_ptr(),
            length_M.data_ptr(), count_M.data_ptr(), ring_SXW.data_ptr(),
            token_T.shape[0], max_rows, tokens_MC.shape[1], ring_SXW.shape[0], ring_SXW.shape[2],
        )  # fmt: skip

    return step_verify


def bind_commit(library: NativeLibrary, problem: StepInputsProblem) -> StepCommit:
    """The kernel of one library."""
    kernel = library.bind("step_commit", *_COMMIT)
    max_rows = problem.max_rows

    def step_commit(
        words: torch.Tensor, token_R: torch.Tensor, value_R: torch.Tensor,
        tables: StepTables, ring_SXW: torch.Tensor,
    ) -> None:  # fmt: skip
        tokens_MC, length_M = tables.tokens_MC, tables.length_M
        assert token_R.dtype == torch.int64 and value_R.dtype == torch.float32, token_R.dtype
        assert ring_SXW.shape[1] == 2 and ring_SXW.shape[2] >= token_R.shape[0], ring_SXW.shape
        assert all(t.is_contiguous() for t in (token_R, value_R, tokens_MC, ring_SXW))
        kernel(
            words.data_ptr(), token_R.data_ptr(), value_R.data_ptr(), tokens_MC.data_ptr(),
            None if length_M is None else length_M.data_ptr(), ring_SXW.data_ptr(),
            token_R.shape[0], max_rows, tokens_MC.shape[1], ring_SXW.shape[0], ring_SXW.shape[2],
        )  # fmt: skip

    return step_commit


INPUTS = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_inputs(loaded(), problem),
)
VERIFY = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_verify(loaded(), problem),
)
COMMIT = Kernel(
    name="native",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=lambda problem: bind_commit(loaded(), problem),
)

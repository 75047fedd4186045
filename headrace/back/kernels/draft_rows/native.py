"""The ops by native kernels, which recorded steps of a CPU are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.kernels.draft_rows.op import (
    DraftFollow,
    DraftInputs,
    DraftKeep,
    DraftPut,
    DraftRowsProblem,
    DraftTake,
    WriteDraftBlock,
    WriteDraftInputs,
    lengths_of,
)
from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary, loaded, unsupported
from headrace.back.kernels.op import Function, Kernel
from headrace.back.kernels.step_inputs.op import StepTables


def bind_follow(library: NativeLibrary, problem: DraftRowsProblem) -> DraftFollow:
    """See op.py."""
    kernel = library.bind("draft_follow", *(POINTER,) * 5, *(INT64,) * 5)

    def draft_follow(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
        tables: StepTables,
        token_T: torch.Tensor,
    ) -> None:
        tokens_MC = tables.tokens_MC
        _check_rows(row_R, query_start_R1)
        assert positions_T.dtype == token_T.dtype == torch.int64 and token_T.is_contiguous()
        kernel(
            row_R.data_ptr(), query_start_R1.data_ptr(), positions_T.data_ptr(),
            tokens_MC.data_ptr(), token_T.data_ptr(), row_R.shape[0], token_T.shape[0],
            *tokens_MC.shape, problem.shift,
        )  # fmt: skip

    return draft_follow


def bind_keep(library: NativeLibrary, problem: DraftRowsProblem) -> DraftKeep:
    """See op.py."""
    kernel = library.bind("draft_keep", *(POINTER,) * 6, *(INT64,) * 5)

    def draft_keep(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
        tables: StepTables,
        hidden: torch.Tensor,
        state_ME: torch.Tensor,
    ) -> None:
        _check_rows(row_R, query_start_R1)
        _check_states(hidden, state_ME)
        kernel(
            row_R.data_ptr(), query_start_R1.data_ptr(), positions_T.data_ptr(),
            lengths_of(tables).data_ptr(), hidden.data_ptr(), state_ME.data_ptr(),
            row_R.shape[0], positions_T.shape[0], hidden.shape[0], state_ME.shape[0],
            state_ME.shape[1] * state_ME.element_size(),
        )  # fmt: skip

    return draft_keep


def bind_take(library: NativeLibrary, problem: DraftRowsProblem) -> DraftTake:
    """See op.py."""
    kernel = library.bind("draft_take", *(POINTER,) * 3, *(INT64,) * 3)

    def draft_take(row_R: torch.Tensor, state_ME: torch.Tensor, hidden_RE: torch.Tensor) -> None:
        _check_states(hidden_RE, state_ME)
        assert row_R.dtype == torch.int32 and row_R.shape[0] == hidden_RE.shape[0], row_R.shape
        kernel(
            row_R.data_ptr(), state_ME.data_ptr(), hidden_RE.data_ptr(), row_R.shape[0],
            state_ME.shape[0], state_ME.shape[1] * state_ME.element_size(),
        )  # fmt: skip

    return draft_take


def bind_put(library: NativeLibrary, problem: DraftRowsProblem) -> DraftPut:
    """See op.py."""
    kernel = library.bind("draft_put", *(POINTER,) * 6, *(INT64,) * 5)

    def draft_put(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        token_R: torch.Tensor,
        offset_D: torch.Tensor | None,
        tables: StepTables,
        draft: int,
    ) -> None:
        _check_rows(row_R, query_start_R1)
        assert token_R.dtype == torch.int64 and token_R.is_contiguous(), token_R.dtype
        offset = None if offset_D is None else offset_D.data_ptr()
        kernel(
            row_R.data_ptr(), query_start_R1.data_ptr(), token_R.data_ptr(), offset,
            lengths_of(tables).data_ptr(), tables.tokens_MC.data_ptr(), row_R.shape[0],
            *tables.tokens_MC.shape, 0 if offset_D is None else offset_D.shape[0], draft,
        )  # fmt: skip

    return draft_put


def bind_inputs(library: NativeLibrary, problem: DraftRowsProblem) -> WriteDraftInputs:
    """See op.py."""
    kernel = library.bind("draft_inputs", *(POINTER,) * 10, *(INT64,) * 8)

    def draft_inputs(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        out: DraftInputs,
        pass_index: int,
    ) -> None:
        _check_rows(row_R, query_start_R1)
        blocks_GMB, num_rows = tables.blocks_GMB, row_R.shape[0]
        written = (out.token_R, out.position_R, out.slots_GR, out.kv_len_R, out.tables_GRB)
        assert all(tensor.is_contiguous() for tensor in written)
        assert out.tables_GRB.shape == (blocks_GMB.shape[0], num_rows, blocks_GMB.shape[2])
        kernel(
            row_R.data_ptr(), query_start_R1.data_ptr(), lengths_of(tables).data_ptr(),
            tables.tokens_MC.data_ptr(), blocks_GMB.data_ptr(),
            *(tensor.data_ptr() for tensor in written), num_rows, *tables.tokens_MC.shape,
            blocks_GMB.shape[0], blocks_GMB.shape[2], problem.block_tokens, pass_index,
            problem.shift,
        )  # fmt: skip

    return draft_inputs


def bind_block(library: NativeLibrary, problem: DraftRowsProblem) -> WriteDraftBlock:
    """See op.py."""
    kernel = library.bind("draft_block", *(POINTER,) * 10, *(INT64,) * 9)

    def draft_block(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        out: DraftInputs,
        mask: int,
        more: int,
    ) -> None:
        _check_rows(row_R, query_start_R1)
        blocks_GMB, num_rows = tables.blocks_GMB, row_R.shape[0]
        written = (out.token_R, out.position_R, out.slots_GR, out.kv_len_R, out.tables_GRB)
        assert all(tensor.is_contiguous() for tensor in written)
        places, rest = divmod(out.token_R.shape[0], num_rows)
        assert rest == 0 and out.tables_GRB.shape[1] == places * num_rows, out.tables_GRB.shape
        kernel(
            row_R.data_ptr(), query_start_R1.data_ptr(), lengths_of(tables).data_ptr(),
            tables.tokens_MC.data_ptr(), blocks_GMB.data_ptr(),
            *(tensor.data_ptr() for tensor in written), num_rows, places, *tables.tokens_MC.shape,
            blocks_GMB.shape[0], blocks_GMB.shape[2], problem.block_tokens, mask, more,
        )  # fmt: skip

    return draft_block


def _check_rows(row_R: torch.Tensor, query_start_R1: torch.Tensor) -> None:
    assert row_R.dtype == query_start_R1.dtype == torch.int32, (row_R.dtype, query_start_R1.dtype)
    assert query_start_R1.shape[0] == row_R.shape[0] + 1, query_start_R1.shape


def _check_states(hidden: torch.Tensor, state_ME: torch.Tensor) -> None:
    assert hidden.dtype == state_ME.dtype and hidden.shape[1] == state_ME.shape[1], hidden.shape
    assert hidden.is_contiguous() and state_ME.is_contiguous()


def _kernel(
    bind: Callable[[NativeLibrary, DraftRowsProblem], Function],
) -> Kernel[DraftRowsProblem]:
    return Kernel(
        name="native",
        supports=lambda problem: unsupported(problem.device, torch.float32),
        bind=lambda problem: bind(loaded(), problem),
        invariant=True,
    )


DRAFT_FOLLOW = _kernel(bind_follow)
DRAFT_KEEP = _kernel(bind_keep)
DRAFT_TAKE = _kernel(bind_take)
DRAFT_PUT = _kernel(bind_put)
DRAFT_INPUTS = _kernel(bind_inputs)
DRAFT_BLOCK = _kernel(bind_block)

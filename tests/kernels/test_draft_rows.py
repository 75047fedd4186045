"""What drafters read of rows and leave in them: native kernels against the references (SPC-05)."""

from __future__ import annotations

import pytest
import torch

from headrace.back.kernels.draft_rows import op as draft_rows
from headrace.back.kernels.draft_rows.op import DraftRowsProblem
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.kernels.norm_columns import op as norm_columns
from headrace.back.kernels.norm_columns.op import NormColumnsProblem
from headrace.back.kernels.op import Op, load_kernel
from headrace.back.kernels.step_inputs.op import StepTables

native = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)


@native
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("op", draft_rows.OPS, ids=lambda op: op.name)
def test_native_kernels_do_what_the_references_do(op: Op[DraftRowsProblem], shift: int) -> None:
    problem = DraftRowsProblem(device="cpu", block_tokens=16, shift=shift)
    kernel = load_kernel(op.kernels[0])
    assert not isinstance(kernel, str), kernel
    assert op.error(kernel, problem) == 0.0


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("width", [8, 37, 384])
def test_columns_are_normed_as_the_reference_norms_them(
    dtype: torch.dtype, eps: float | None, width: int
) -> None:
    problem = NormColumnsProblem(device="cpu", dtype=dtype, width=width, eps=eps)
    kernel = load_kernel(norm_columns.OP.kernels[0])
    assert not isinstance(kernel, str), kernel
    assert norm_columns.OP.error(kernel, problem) <= norm_columns.OP.tolerance(problem)


def tables() -> StepTables:
    """A row of 18 tokens, 100, 101, ..., in blocks 5 and 9."""
    tokens_MC = torch.zeros((3, 40), dtype=torch.int32)
    tokens_MC[1, :18] = torch.arange(100, 118, dtype=torch.int32)
    blocks_GMB = torch.zeros((1, 3, 3), dtype=torch.int32)
    blocks_GMB[0, 1, :2] = torch.tensor([5, 9])
    length_M = torch.tensor([0, 18, 0], dtype=torch.int32)
    return StepTables(tokens_MC=tokens_MC, blocks_GMB=blocks_GMB, length_M=length_M)


def test_drafts_are_put_behind_the_row_and_read_by_the_next_pass() -> None:
    """The third pass of a head: two drafts are there, and its keys stand one place before."""
    problem = DraftRowsProblem(device="cpu", block_tokens=16, shift=1)
    rows, start = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    place = tables()
    put = draft_rows.bind_put(problem)
    put(rows, start, torch.tensor([3]), torch.tensor([0, 0, 0, 50]), place, 1)
    put(rows, start, torch.tensor([7]), None, place, 2)
    put(rows, start, torch.tensor([8]), None, place, 4)  # it wants three
    assert place.tokens_MC[1, 17:22].tolist() == [117, 53, 7, 0, 0]
    new = {"dtype": torch.int64}
    out = draft_rows.DraftInputs(
        token_R=torch.zeros(1, **new),
        position_R=torch.zeros(1, **new),
        slots_GR=torch.zeros((1, 1), **new),
        kv_len_R=torch.zeros(1, dtype=torch.int32),
        tables_GRB=torch.zeros((1, 1, 3), dtype=torch.int32),
    )
    draft_rows.bind_inputs(problem)(rows, start, place, out, 2)
    assert (int(out.token_R), int(out.position_R), int(out.kv_len_R)) == (7, 18, 19)
    assert int(out.slots_GR) == 9 * 16 + 2
    draft_rows.bind_inputs(problem)(rows, start, place, out, 3)  # the row wants no fourth draft
    assert (int(out.token_R), int(out.position_R), int(out.slots_GR)) == (0, 0, 0)

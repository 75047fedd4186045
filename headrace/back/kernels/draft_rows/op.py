"""What a drafter with weights reads of rows, and leaves in them, inside the step: tokens, slots,
its own states and its drafts (back/speculative/network.py says what they are for).

Six ops of one problem. R rows of a step (row_R int32 [R]; padding: row M, which nobody owns),
query_start_R1 int32 [R+1], T query tokens at positions_T int64 [T], E hidden size. Tables are those
of op step_inputs and have lengths. A row wants query_start[r + 1] - query_start[r] - 1 drafts.

draft_follow(row_R, query_start_R1, positions_T, tables, token_T) -> None: into token_T int64 the
    token of each query's row `shift` places behind its position; 0 for padding.
draft_keep(row_R, query_start_R1, positions_T, tables, hidden, state_ME) -> None: into state_ME
    [M+1, E] of each row what its newest token but one has given: hidden is [T, E], or [R, E] with
    one of each row. Of a prompt that goes on it is that of the chunk's last token.
draft_take(row_R, state_ME, hidden_RE) -> None: the rows of state_ME.
draft_put(row_R, query_start_R1, token_R, offset_D, tables, draft) -> None: token_R int64 [R] are
    each row's draft number `draft` (from 1 on), and go into its table if it wants so many. offset_D
    int64 [D], or None: what is added to each token of the drafter's vocabulary to have the model's.
draft_inputs(row_R, query_start_R1, tables, out, pass_index) -> None: what pass `pass_index` of the
    drafter reads: the token behind `pass_index` drafts, at a position `shift` before its own; of a
    row that wants no more drafts token 0 in slot 0, where nobody's keys lie.
draft_block(row_R, query_start_R1, tables, out, mask, more) -> None: what a drafter reads that
    drafts all at once: Q places of each row, place after place (out has Q * R), each a row of its
    own. The first is the newest token, the others the token `mask`, at the positions behind. A row
    that wants w > 0 drafts has w + `more` places; of the further ones, and of rows that want none,
    token 0 in slot 0. With `more` 0 a place sees those up to its own, else all of its row's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Function, Kernel, Op, Sample, sample_generator
from headrace.back.kernels.step_inputs.op import StepTables


@dataclass(frozen=True, kw_only=True)
class DraftRowsProblem:
    """`shift`: places between the position of a token's keys in the drafter's cache and its own:
    1 for heads, which read it beside the hidden state before it, 0 for whole models."""

    device: str
    block_tokens: int
    shift: int


@dataclass(frozen=True, kw_only=True)
class DraftInputs:
    """What a pass reads. token, position int64 [R]; slots int64 [G, R]; kv_len int32 [R]; tables
    int32 [G, R, B]."""

    token_R: torch.Tensor
    position_R: torch.Tensor
    slots_GR: torch.Tensor
    kv_len_R: torch.Tensor
    tables_GRB: torch.Tensor


DraftFollow = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, StepTables, torch.Tensor],
    None,
]
DraftKeep = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, StepTables, torch.Tensor, torch.Tensor], None
]
DraftTake = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
DraftPut = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, StepTables, int], None
]
WriteDraftInputs = Callable[[torch.Tensor, torch.Tensor, StepTables, DraftInputs, int], None]
WriteDraftBlock = Callable[[torch.Tensor, torch.Tensor, StepTables, DraftInputs, int, int], None]


def lengths_of(tables: StepTables) -> torch.Tensor:
    """The rows' lengths, which tables of steps that draft have."""
    assert tables.length_M is not None
    return tables.length_M


def bind_follow(problem: DraftRowsProblem) -> DraftFollow:
    """The reference; safe in graphs, as all here."""

    def draft_follow(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
        tables: StepTables,
        token_T: torch.Tensor,
    ) -> None:
        place_T = torch.arange(positions_T.shape[0], dtype=torch.int32, device=row_R.device)
        index_T = torch.searchsorted(query_start_R1[1:], place_T, right=True)
        row_T = row_R.long().index_select(0, index_T.clamp_(max=row_R.shape[0] - 1))
        column_T = (positions_T + problem.shift).clamp(max=tables.tokens_MC.shape[1] - 1)
        real_T = place_T < query_start_R1[-1]
        token_T.copy_(torch.where(real_T, tables.tokens_MC[row_T, column_T], 0))

    return draft_follow


def bind_keep(problem: DraftRowsProblem) -> DraftKeep:
    """The reference."""

    def draft_keep(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
        tables: StepTables,
        hidden: torch.Tensor,
        state_ME: torch.Tensor,
    ) -> None:
        first_R, num_R = query_start_R1[:-1].long(), query_start_R1.diff().long()
        nobody = state_ME.shape[0] - 1
        row_R = torch.where(num_R > 0, row_R.long(), nobody)
        if hidden.shape[0] == positions_T.shape[0]:
            begin_R = positions_T[first_R.clamp(max=positions_T.shape[0] - 1)]
            behind_R = (lengths_of(tables)[row_R].long() - 2 - begin_R).clamp_(min=0)
            at_R = (first_R + torch.minimum(behind_R, num_R - 1)).clamp_(0, hidden.shape[0] - 1)
            hidden = hidden.index_select(0, at_R)
        state_ME.index_copy_(0, row_R, hidden)

    return draft_keep


def bind_take(problem: DraftRowsProblem) -> DraftTake:
    """The reference."""

    def draft_take(row_R: torch.Tensor, state_ME: torch.Tensor, hidden_RE: torch.Tensor) -> None:
        hidden_RE.copy_(state_ME.index_select(0, row_R.long()))

    return draft_take


def bind_put(problem: DraftRowsProblem) -> DraftPut:
    """The reference. A row that wants no more has it in the last row, which nobody owns."""

    def draft_put(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        token_R: torch.Tensor,
        offset_D: torch.Tensor | None,
        tables: StepTables,
        draft: int,
    ) -> None:
        tokens_MC = tables.tokens_MC
        rows, columns = tokens_MC.shape
        if offset_D is not None:
            token_R = token_R + offset_D[token_R]
        column_R = lengths_of(tables)[row_R.long()].long() + draft - 1
        wanted_R = query_start_R1.diff() - 1
        row_R = torch.where((draft <= wanted_R) & (column_R < columns), row_R.long(), rows - 1)
        at_R = row_R * columns + column_R.clamp_(max=columns - 1)
        tokens_MC.view(-1).index_copy_(0, at_R, token_R.to(torch.int32))

    return draft_put


def bind_inputs(problem: DraftRowsProblem) -> WriteDraftInputs:
    """The reference."""
    size = problem.block_tokens

    def draft_inputs(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        out: DraftInputs,
        pass_index: int,
    ) -> None:
        tokens_MC, blocks_GMB = tables.tokens_MC, tables.blocks_GMB
        row_R = row_R.long()
        column_R = lengths_of(tables)[row_R].long() - 1 + pass_index
        position_R = column_R - problem.shift
        most = min(tokens_MC.shape[1], blocks_GMB.shape[2] * size + problem.shift)
        wanted_R = query_start_R1.diff() - 1
        live_R = (pass_index < wanted_R) & (position_R >= 0) & (column_R < most)
        position_R = torch.where(live_R, position_R, 0)
        token_R = tokens_MC[row_R, column_R.clamp(0, tokens_MC.shape[1] - 1)]
        out.token_R.copy_(torch.where(live_R, token_R, 0))
        out.position_R.copy_(position_R)
        out.kv_len_R.copy_(position_R + 1)
        out.tables_GRB.copy_(blocks_GMB[:, row_R])
        block_R = torch.div(position_R, size, rounding_mode="floor")
        for blocks_MB, slot_R in zip(blocks_GMB, out.slots_GR, strict=True):
            slot_at_R = blocks_MB[row_R, block_R] * size + position_R - block_R * size
            slot_R.copy_(torch.where(live_R, slot_at_R, 0))

    return draft_inputs


def bind_block(problem: DraftRowsProblem) -> WriteDraftBlock:
    """The reference."""
    size = problem.block_tokens

    def draft_block(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        out: DraftInputs,
        mask: int,
        more: int,
    ) -> None:
        tokens_MC, blocks_GMB = tables.tokens_MC, tables.blocks_GMB
        count, places = row_R.shape[0], out.token_R.shape[0] // row_R.shape[0]
        newest_R = lengths_of(tables)[row_R.long()].long() - 1
        most = min(tokens_MC.shape[1], blocks_GMB.shape[2] * size)
        wanted_R = query_start_R1.diff().long() - 1
        end_R = torch.where(wanted_R > 0, newest_R + wanted_R + more, 0).clamp_(max=most)
        place_Q = torch.arange(places, device=row_R.device).repeat_interleave(count)
        row_Q, position_Q = row_R.long().repeat(places), newest_R.repeat(places) + place_Q
        live_Q = (position_Q < end_R.repeat(places)) & (position_Q >= place_Q)
        token_Q = tokens_MC[row_Q, newest_R.clamp(min=0).repeat(places)]
        token_Q = torch.where(place_Q > 0, mask, token_Q)
        position_Q = torch.where(live_Q, position_Q, 0)
        seen_Q = end_R.repeat(places) if more else position_Q + 1
        out.token_R.copy_(torch.where(live_Q, token_Q, 0))
        out.position_R.copy_(position_Q)
        out.kv_len_R.copy_(torch.where(live_Q, seen_Q, 1))
        out.tables_GRB.copy_(blocks_GMB[:, row_Q])
        block_Q = torch.div(position_Q, size, rounding_mode="floor")
        for blocks_MB, slot_Q in zip(blocks_GMB, out.slots_GR, strict=True):
            slot_at_Q = blocks_MB[row_Q, block_Q] * size + position_Q - block_Q * size
            slot_Q.copy_(torch.where(live_Q, slot_at_Q, 0))

    return draft_block


def _tables(device: str) -> StepTables:
    generator = sample_generator()
    tokens_MC = torch.randint(1, 60, (7, 40), generator=generator, dtype=torch.int32)
    blocks_GMB = torch.randint(1, 30, (2, 7, 3), generator=generator, dtype=torch.int32)
    return StepTables(
        tokens_MC=tokens_MC.to(device),
        blocks_GMB=blocks_GMB.to(device),
        length_M=torch.tensor([9, 1, 20, 39, 12, 3, 0], dtype=torch.int32, device=device),
    )


def _rows(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of 4, 1 and 3 query tokens, one near the end of its table, padding; and positions."""
    new = {"dtype": torch.int32, "device": device}
    row_R = torch.tensor([2, 0, 3, 4, 6], **new)
    start_R1 = torch.tensor([0, 4, 5, 8, 10, 10], **new)
    position_T = [17, 18, 19, 20, 7, 36, 37, 38, 4, 5, 0, 0]
    return row_R, start_R1, torch.tensor(position_T, device=device)


def _follow_sample(problem: DraftRowsProblem) -> Sample:
    row_R, start_R1, positions_T = _rows(problem.device)
    token_T = torch.full_like(positions_T, -1)
    arguments = (row_R, start_R1, positions_T, _tables(problem.device), token_T)
    return Sample(problem=problem, weights=(), arguments=arguments)


def _keep_sample(problem: DraftRowsProblem) -> Sample:
    """Hidden states of all tokens, and of one for each row."""
    device = problem.device
    rows, tables = _rows(device), _tables(device)
    states = [torch.full((7, 8), -1.0, device=device) for _ in range(2)]
    hidden_TE = torch.arange(96.0, device=device).view(12, 8)
    return Sample(
        problem=problem,
        weights=(),
        arguments=(*rows, tables, hidden_TE, states[0]),
        further=((*rows, tables, hidden_TE[:5], states[1]),),
    )


def _kept(sample: Sample) -> list[torch.Tensor]:
    return [call[-1][:6] for call in (sample.arguments, *sample.further)]


def _take_sample(problem: DraftRowsProblem) -> Sample:
    state_ME = torch.arange(56.0, device=problem.device).view(7, 8)
    hidden_RE = torch.full((5, 8), -1.0, device=problem.device)
    row_R, _, _ = _rows(problem.device)
    return Sample(problem=problem, weights=(), arguments=(row_R, state_ME, hidden_RE))


def _put_sample(problem: DraftRowsProblem) -> Sample:
    """With a vocabulary of its own, and without."""
    device = problem.device
    row_R, start_R1, _ = _rows(device)
    tables, token_R = _tables(device), torch.tensor([3, 0, 2, 1, 0], device=device)
    offset_D = torch.tensor([5, 9, 40, 700], device=device)
    return Sample(
        problem=problem,
        weights=(),
        arguments=(row_R, start_R1, token_R, offset_D, tables, 1),
        further=((row_R, start_R1, token_R, None, tables, 2),),
    )


def _put(sample: Sample) -> list[torch.Tensor]:
    return [sample.arguments[4].tokens_MC[:6]]


def _empty_inputs(device: str, rows: int) -> DraftInputs:
    new = {"dtype": torch.int64, "device": device}
    return DraftInputs(
        token_R=torch.full((rows,), -1, **new),
        position_R=torch.full((rows,), -1, **new),
        slots_GR=torch.full((2, rows), -1, **new),
        kv_len_R=torch.full((rows,), -1, dtype=torch.int32, device=device),
        tables_GRB=torch.full((2, rows, 3), -1, dtype=torch.int32, device=device),
    )


def _inputs_sample(problem: DraftRowsProblem) -> Sample:
    device = problem.device
    row_R, start_R1, _ = _rows(device)
    calls = [
        (row_R, start_R1, _tables(device), _empty_inputs(device, 5), pass_index)
        for pass_index in range(3)
    ]
    return Sample(problem=problem, weights=(), arguments=calls[0], further=tuple(calls[1:]))


def _block_sample(problem: DraftRowsProblem) -> Sample:
    """Places that see those before them, and such that see all."""
    device = problem.device
    row_R, start_R1, _ = _rows(device)
    calls = [
        (row_R, start_R1, _tables(device), _empty_inputs(device, 5 * places), 61, more)
        for places, more in ((3, 0), (4, 1))
    ]
    return Sample(problem=problem, weights=(), arguments=calls[0], further=tuple(calls[1:]))


def _inputs(sample: Sample) -> list[torch.Tensor]:
    outs = [call[3] for call in (sample.arguments, *sample.further)]
    return [
        tensor
        for out in outs
        for tensor in (out.token_R, out.position_R, out.slots_GR, out.kv_len_R, out.tables_GRB)
    ]


def _op(
    name: str,
    bind: Callable[[DraftRowsProblem], Function],
    sample: Callable[[DraftRowsProblem], Sample],
    outputs: Callable[[Sample], list[torch.Tensor]] | None = None,
) -> Op[DraftRowsProblem]:
    return Op(
        name=name,
        reference=Kernel(name="torch", supports=lambda problem: None, bind=bind, invariant=True),
        kernels=(f"headrace.back.kernels.draft_rows.native:{name.upper()}",),
        sample=sample,
        tolerance=lambda problem: 0.0,
        outputs=outputs,
    )


FOLLOW_OP = _op("draft_follow", bind_follow, _follow_sample)
KEEP_OP = _op("draft_keep", bind_keep, _keep_sample, _kept)
TAKE_OP = _op("draft_take", bind_take, _take_sample)
PUT_OP = _op("draft_put", bind_put, _put_sample, _put)
INPUTS_OP = _op("draft_inputs", bind_inputs, _inputs_sample, _inputs)
BLOCK_OP = _op("draft_block", bind_block, _block_sample, _inputs)
OPS = (FOLLOW_OP, KEEP_OP, TAKE_OP, PUT_OP, INPUTS_OP, BLOCK_OP)

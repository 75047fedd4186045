"""From one small message of the host to the inputs of a step, all on the device.

`bind(problem)` returns `f(words, tables, out) -> None`. It first writes the step's block updates
into the block tables, then builds what the model reads, padded to the bucket: T query tokens, R
rows. The message, int32 words (M: the most rows; P = M + 8, so that sections stay aligned):

    0                HEADER words: real rows, real query tokens, leading rows with one query token,
                     updates, ring slot
    HEADER           row [P]           of each row of the step; padding: row M, which nobody owns
    HEADER + P       kv_len [P]        tokens in the KV cache once this step's are written; padding:
                                       0; with lengths on the device an upper bound
    HEADER + 2P      query_start [P]   first query token of each row; from the last real row on: the
                                       number of tokens
    HEADER + 3P      sample [P]        1 where the row's last query token is sampled
    HEADER + 4P      pairs of words: place in the flattened block tables, block id

With lengths on the device a row of n query tokens begins at position min(kv_len - n, length - 1): a
prompt's tokens are all there, so that the first term is the chunk's own, and a row that decodes
begins with its newest token, however many the steps before it have accepted.

Groups of caches may have blocks of sizes of their own (`GroupBlocks`). A cross cache holds an
encoder's output, as many tokens as the table says of the row, none of which a step's tokens write,
so that their slots are 0. Where groups differ, each row's length in each group is written too.

Padding tokens are token 0 at position 0 in slot 0. The token ids come from the rows' own table, so
that what the step before sampled is read here without a word to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, sample_generator

HEADER = 8
ROWS, TOKENS, LEADING, UPDATES, SLOT = range(5)


@dataclass(frozen=True, kw_only=True)
class StepTables:
    """What outlives a step. tokens int32 [M+1, C]; blocks int32 [G, M+1, B]; length int32 [M+1]:
    tokens that a row has, or None where the messages say all lengths. predicted int32 [M+1]: so
    many tokens at the end of a row's columns are not its own, but what its answer is expected to
    be (op ngram_draft). cross int32 [M+1]: tokens in a row's cross caches, at most their span, or
    None where they have as many as that."""

    tokens_MC: torch.Tensor
    blocks_GMB: torch.Tensor
    length_M: torch.Tensor | None = None
    predicted_M: torch.Tensor | None = None
    cross_M: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepOut:
    """What is built. token_ids, positions int64 [T]; slots int64 [G, T]; tables int32 [G, R, B];
    last int64 [R]: each row's last query token (padding: 0). `updates`: the most block updates a
    message of this bucket holds. kv_len int32 [R], where the tables have lengths: what the
    message's bound has come to. lengths int32 [G, R], where groups differ: of each row in each
    group; padding: 0."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor
    tables_GRB: torch.Tensor
    last_R: torch.Tensor
    updates: int
    kv_len_R: torch.Tensor | None = None
    lengths_GR: torch.Tensor | None = None


StepInputs = Callable[[torch.Tensor, StepTables, StepOut], None]


@dataclass(frozen=True, kw_only=True)
class GroupBlocks:
    """A group of caches. tokens: of a block. span: of a cross cache, the most tokens of an
    encoder's output; 0: the cache grows with the row."""

    tokens: int
    span: int = 0


@dataclass(frozen=True, kw_only=True)
class StepInputsProblem:
    """`max_rows` is M. `speculates`: the rows' lengths lie on the device. `groups`: of each KV
    group, where they are not all of `block_tokens` and grow with the row."""

    device: str
    block_tokens: int
    max_rows: int
    speculates: bool = False
    groups: tuple[GroupBlocks, ...] = ()

    def groups_of(self, num_groups: int) -> tuple[GroupBlocks, ...]:
        """Each of so many groups."""
        assert len(self.groups) in (0, num_groups), (self.groups, num_groups)
        return self.groups or (GroupBlocks(tokens=self.block_tokens),) * num_groups

    @cached_property
    def section(self) -> int:
        """P: words of one section of the message."""
        return self.max_rows + 8

    @cached_property
    def updates_at(self) -> int:
        """Where the updates begin."""
        return HEADER + 4 * self.section


def bind_reference(problem: StepInputsProblem) -> StepInputs:
    """The reference: no value of it is asked for by the host either."""
    size = problem.section

    def step_inputs(words: torch.Tensor, tables: StepTables, out: StepOut) -> None:
        num_rows_max = out.last_R.shape[0]
        row_R, kv_len_R, start_R1, _ = (
            words[HEADER + i * size :][: num_rows_max + (i == 2)].long() for i in range(4)
        )
        if tables.length_M is not None:
            assert out.kv_len_R is not None
            num_R = start_R1[1:] - start_R1[:-1]
            first_R = torch.minimum(kv_len_R - num_R, tables.length_M[row_R].long() - 1)
            kv_len_R = torch.where(num_R > 0, first_R + num_R, 0)
            out.kv_len_R.copy_(kv_len_R)
        _update(problem, words, tables.blocks_GMB, out.updates)
        place_T = torch.arange(out.token_ids_T.shape[0], device=words.device)
        real_T = place_T < words[TOKENS]
        index_T = torch.searchsorted(start_R1[1:], place_T, right=True).clamp_(max=num_rows_max - 1)
        position_T = (kv_len_R - start_R1[1:])[index_T] + place_T
        position_T = torch.where(real_T, position_T, 0)
        row_T = row_R[index_T]
        out.token_ids_T.copy_(torch.where(real_T, tables.tokens_MC[row_T, position_T], 0))
        out.positions_T.copy_(position_T)
        groups = problem.groups_of(len(tables.blocks_GMB))
        for blocks_MB, slot_T, table_RB, group in zip(
            tables.blocks_GMB, out.slots_GT, out.tables_GRB, groups, strict=True
        ):
            table_RB.copy_(blocks_MB[row_R])
            if group.span:
                slot_T.zero_()
                continue
            block_T = torch.div(position_T, group.tokens, rounding_mode="floor")
            offset_T = position_T - block_T * group.tokens
            block_T = blocks_MB[row_T, block_T]
            slot_T.copy_(torch.where(real_T, block_T * group.tokens + offset_T, 0))
        if out.lengths_GR is not None:
            for length_R, group in zip(out.lengths_GR, groups, strict=True):
                cross_R: int | torch.Tensor = group.span
                if tables.cross_M is not None:
                    cross_R = tables.cross_M[row_R].clamp(max=group.span)
                length_R.copy_((kv_len_R > 0) * cross_R if group.span else kv_len_R)
        out.last_R.copy_((start_R1[1:] - 1).clamp_(min=0))

    return step_inputs


def _update(
    problem: StepInputsProblem, words: torch.Tensor, blocks_GMB: torch.Tensor, most: int
) -> None:
    pairs_U2 = words[problem.updates_at :][: 2 * most].view(most, 2)
    nobody = problem.max_rows * blocks_GMB.shape[2]
    real_U = torch.arange(most, device=words.device) < words[UPDATES]
    at_U = torch.where(real_U, pairs_U2[:, 0], nobody).long()
    value_U = torch.where(real_U, pairs_U2[:, 1], 0)
    blocks_GMB.view(-1).index_copy_(0, at_U, value_U)


def _sample(problem: StepInputsProblem) -> Sample:
    """Two decodes and a chunk in a bucket of 5 rows and 12 tokens, three updates; two groups, or
    those of the problem."""
    device, size, most = problem.device, problem.section, 4
    problem = replace(problem, max_rows=9)
    size, generator = problem.section, sample_generator()
    words = torch.zeros(problem.updates_at + 2 * most, dtype=torch.int32)
    words[:4] = torch.tensor([3, 9, 2, 3])
    rows, columns = 10, 3
    groups = problem.groups_of(len(problem.groups) or 2)
    for i, values in enumerate(
        ([4, 0, 7, 9, 9], [1, 18, 2 * problem.block_tokens + 5, 0, 0], [0, 1, 2, 9, 9, 9])
    ):
        words[HEADER + i * size :][: len(values)] = torch.tensor(values)
    pairs = [4 * columns, 31, 7 * columns + 2, 32, rows * columns + 7 * columns + 2, 33]
    words[problem.updates_at :][: len(pairs)] = torch.tensor(pairs)
    tokens = torch.randint(1, 99, (rows, 80), generator=generator, dtype=torch.int32)
    shape = (len(groups), rows, columns)
    blocks = torch.randint(1, 30, shape, generator=generator, dtype=torch.int32)
    length_M = torch.full((rows,), 2 * problem.block_tokens + 6, dtype=torch.int32)
    length_M[0] = 17  # it decodes, and has gained a token less than the message allows for
    spans = [group.span for group in groups]
    cross_M = torch.arange(rows, dtype=torch.int32) * 5
    tables = StepTables(
        tokens_MC=tokens.to(device),
        blocks_GMB=blocks.to(device),
        length_M=length_M.to(device) if problem.speculates else None,
        cross_M=cross_M.to(device) if any(spans) else None,
    )
    new = {"dtype": torch.int64, "device": device}
    out = StepOut(
        token_ids_T=torch.full((12,), -1, **new),
        positions_T=torch.full((12,), -1, **new),
        slots_GT=torch.full((len(groups), 12), -1, **new),
        tables_GRB=torch.zeros((len(groups), 5, columns), dtype=torch.int32, device=device),
        last_R=torch.full((5,), -1, **new),
        updates=most,
        kv_len_R=torch.full((5,), -1, dtype=torch.int32, device=device)
        if problem.speculates
        else None,
        lengths_GR=torch.full((len(groups), 5), -1, dtype=torch.int32, device=device)
        if problem.groups
        else None,
    )
    return Sample(problem=problem, weights=(), arguments=(words.to(device), tables, out))


def outputs(sample: Sample) -> list[torch.Tensor]:
    """What the callable has written, with what means nothing set to 0: table entries past a row's
    length."""
    words, tables, out = sample.arguments
    row_R, length_R = (
        words[HEADER + i * sample.problem.section :][: out.last_R.shape[0]] for i in range(2)
    )
    column_B = torch.arange(out.tables_GRB.shape[2], device=length_R.device)
    cross_R = length_R if tables.cross_M is None else tables.cross_M[row_R.long()]
    kept_GRB = torch.stack(
        [
            column_B
            < -(
                -((length_R > 0) * cross_R.clamp(max=group.span) if group.span else length_R)
                // group.tokens
            )[:, None]
            for group in sample.problem.groups_of(len(out.tables_GRB))
        ]
    )
    return [
        tables.blocks_GMB[:, : sample.problem.max_rows],
        out.token_ids_T,
        out.positions_T,
        out.slots_GT,
        out.tables_GRB * kept_GRB,
        out.last_R,
        *(one for one in (out.kv_len_R, out.lengths_GR) if one is not None),
    ]


OP: Op[StepInputsProblem] = Op(
    name="step_inputs",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.step_inputs.triton_step:KERNEL",
        "headrace.back.kernels.step_inputs.native:INPUTS",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)

"""Drafts by prompt lookup (Saxena 2023, "Prompt Lookup Decoding"): what followed when a row's last
tokens stood in its own text before.

`bind(problem)` returns `f(row_R, query_start_R1, tables, count_M) -> None`. Row r of the step wants
at most query_start[r + 1] - query_start[r] - 1 drafts (row_R int32 [R], query_start int32 [R+1]).
Among the earlier places where the row's last n tokens stand, n from `max_match` down to
`min_match`, the longest match counts; of equal ones the latest that has all wanted tokens behind
it, and if none has, the earliest, which has the most. The tokens behind it are written into the
row's table behind its own, from position `length` on, where op `step_inputs` reads them as query
tokens, and their number into count_M int32 [M+1]. The tables are those of op `step_inputs`, with
lengths.

Where a client has said what the answer may be, the last `predicted` columns of its row hold that
text. It is searched too, as long as the row's tokens and drafts do not reach into it; of matches of
equal length those in it count first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, sample_generator
from headrace.back.kernels.step_inputs.op import StepTables

NgramDraft = Callable[[torch.Tensor, torch.Tensor, StepTables, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class NgramDraftProblem:
    """`min_match`, `max_match`: tokens that must be equal, at least and at most (1 <= min <=
    max)."""

    device: str
    min_match: int
    max_match: int


def lookup(
    tokens: list[int],
    *,
    most: int,
    min_match: int,
    max_match: int,
    predicted: Sequence[int] = (),
) -> list[int]:
    """The drafts for a row of these tokens, at most `most`: the definition."""
    best: tuple[int, bool, bool, int] | None = None
    texts = {False: tokens, True: list(predicted)}
    for is_predicted, text in texts.items():
        for end in range(len(text) - 1):  # the last token of a place
            longest, match = min(max_match, end + 1, len(tokens)), 0
            while match < longest and text[end - match] == tokens[-1 - match]:
                match += 1
            whole = end + most < len(text)
            key = (match, is_predicted, whole, end if whole else -end)
            if match >= min_match and (best is None or key > best):
                best = key
    if best is None:
        return []
    place = abs(best[3])
    return texts[best[1]][place + 1 : place + 1 + most]


def bind_reference(problem: NgramDraftProblem) -> NgramDraft:
    """The reference, a row at a time."""

    def ngram_draft(
        row_R: torch.Tensor, query_start_R1: torch.Tensor, tables: StepTables, count_M: torch.Tensor
    ) -> None:
        assert tables.length_M is not None
        wanted = (query_start_R1[1:] - query_start_R1[:-1] - 1).tolist()
        for row, most in zip(row_R.tolist(), wanted, strict=True):
            length = int(tables.length_M[row])
            drafts: list[int] = []
            columns, predicted = tables.tokens_MC.shape[1], 0
            if tables.predicted_M is not None:
                predicted = int(tables.predicted_M[row])
            if length + most > columns - predicted:
                predicted = 0
            if most > 0:
                drafts = lookup(
                    tables.tokens_MC[row, :length].tolist(),
                    most=most,
                    min_match=problem.min_match,
                    max_match=problem.max_match,
                    predicted=tables.tokens_MC[row, columns - predicted :].tolist(),
                )
            written = torch.tensor(drafts, dtype=torch.int32, device=count_M.device)
            tables.tokens_MC[row, length : length + len(drafts)] = written
            count_M[row] = len(drafts)

    return ngram_draft


def _sample(problem: NgramDraftProblem) -> Sample:
    """Rows that repeat themselves, one that does not, one that wants nothing, a long one, two with
    predicted text, padding."""
    device, generator = problem.device, sample_generator()
    tokens_MC = torch.zeros((7, 2600), dtype=torch.int32)
    lengths = [40, 9, 30, 2500, 12, 1, 1]
    for row, length in enumerate(lengths):
        tokens_MC[row, :length] = torch.randint(0, 4 + row, (length,), generator=generator)
    tokens_MC[1, :9] = torch.arange(9)
    tokens_MC[3, 2490:2500] = tokens_MC[3, 1020:1030]
    tokens_MC[4, :12] = torch.tensor([5, 6] * 6)
    tokens_MC[1, -6:] = torch.tensor([7, 8, 90, 91, 92, 93])
    tokens_MC[3, -80:-60] = tokens_MC[3, 2480:2500]
    tokens_MC[3, -60:] = 3
    predicted_M = torch.tensor([0, 6, 0, 80, 0, 0, 0], dtype=torch.int32)
    row_R = torch.tensor([3, 0, 1, 2, 4, 6], dtype=torch.int32)
    start_R1 = torch.tensor([0, 7, 12, 16, 17, 24, 24], dtype=torch.int32)
    tables = StepTables(
        tokens_MC=tokens_MC.to(device),
        blocks_GMB=torch.zeros((1, 7, 2), dtype=torch.int32, device=device),
        length_M=torch.tensor(lengths, dtype=torch.int32, device=device),
        predicted_M=predicted_M.to(device),
    )
    count_M = torch.full((7,), -1, dtype=torch.int32, device=device)
    arguments = (row_R.to(device), start_R1.to(device), tables, count_M)
    return Sample(problem=problem, weights=(), arguments=arguments)


def outputs(sample: Sample) -> list[torch.Tensor]:
    """The rows' tokens with their drafts, and the counts; the row of padding is nobody's."""
    _, _, tables, count_M = sample.arguments
    return [tables.tokens_MC[:6], count_M[:6]]


OP: Op[NgramDraftProblem] = Op(
    name="ngram_draft",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.ngram_draft.triton_ngram:KERNEL",
        "headrace.back.kernels.ngram_draft.native:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
    outputs=outputs,
)

"""Drafts that stand by a stated rate, whatever the model says: what a drafter would bring that is
right so often, for measuring speed. The answers are not the model's.

Where a draft is to stand, the sample in its place is made equal to it in front of op step_verify;
where it is not, it is made another one.
Whether it does is a function of its row and position alone. T query tokens, R rows of the step.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from headrace.back.kernels.step_inputs.op import HEADER, ROWS, TOKENS, StepInputsProblem, StepTables
from headrace.back.kernels.step_verify.op import StepVerify

_POSITION, _ROW, _MIX, _PARTS = 2654435761, 40503, 2246822519, 1 << 16


def synthetic(
    verify: StepVerify, rates: tuple[float, ...], problem: StepInputsProblem, device: torch.device
) -> StepVerify:
    """`verify` behind drafts of which the first i + 1 stand together with the rate rates[i]; safe
    in CUDA graphs."""
    each = [now / before if before else 0.0 for before, now in pairwise((1.0, *rates))]
    rate_D = torch.tensor([*each, 0.0], device=device)
    size = problem.section

    def verified(
        words: torch.Tensor,
        token_T: torch.Tensor,
        value_T: torch.Tensor,
        tables: StepTables,
        count_M: torch.Tensor,
        ring_SXW: torch.Tensor,
    ) -> None:
        assert tables.length_M is not None
        row_R, kv_len_R, start_R = (words[HEADER + i * size :][:size].long() for i in range(3))
        is_real_R = torch.arange(size, device=words.device) < words[ROWS]
        end_R = torch.where(is_real_R, start_R.roll(-1), words[TOKENS])
        place_T = torch.arange(token_T.shape[0], device=words.device)
        index_T = torch.searchsorted(end_R, place_T, right=True).clamp_(max=size - 1)
        row_T, start_T, num_T = row_R[index_T], start_R[index_T], (end_R - start_R)[index_T]
        first_T = torch.minimum(kv_len_R[index_T] - num_T, tables.length_M[row_T].long() - 1)
        draft_T = place_T - start_T
        column_T = (first_T + 1 + draft_T).clamp(0, tables.tokens_MC.shape[1] - 1)
        drafts_T = tables.tokens_MC[row_T, column_T].long()
        proposed_T = torch.minimum(count_M[row_T].long(), num_T - 1)
        mixed_T = (column_T * _POSITION + row_T * _ROW) % (1 << 32) * _MIX % (1 << 32)
        chance_T = (mixed_T >> 16).float() / _PARTS
        stands_T = chance_T < rate_D[draft_T.clamp(0, len(each))]
        stands_T &= (draft_T >= 0) & (draft_T < proposed_T)
        other_T = torch.where(drafts_T > 0, drafts_T - 1, 1)
        falls_T = ~stands_T & (token_T == drafts_T)
        token_T.copy_(torch.where(stands_T, drafts_T, torch.where(falls_T, other_T, token_T)))
        verify(words, token_T, value_T, tables, count_M, ring_SXW)

    return verified

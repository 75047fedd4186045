"""Steps in which tokens of a span see each other, among tokens that see what is before them: the
rows of a plan cut into pieces, which two kernels take, one of them without a causal mask.

A piece's queries are the last of the tokens it knows, as those of any row are; so kernels need
nothing of their own. T query tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan, MutualPlans, PlanPart

Span = tuple[int, int]
"""The first position, and that behind the last."""


@dataclass(frozen=True)
class _Piece:
    """Query tokens begin .. end - 1 of a row, with which it has `kv_len` tokens."""

    row: int
    begin: int
    end: int
    kv_len: int


def with_mutual(plan: AttentionPlan, spans: Sequence[Sequence[Span]]) -> AttentionPlan:
    """The plan of an exact step whose rows have these spans, none of which it ends within."""
    starts, lengths = plan.host_query_start, plan.host_kv_len
    assert starts is not None and lengths is not None, plan
    causal: list[_Piece] = []
    mutual: list[_Piece] = []
    for row, own in enumerate(spans):
        begin, end, kv_len = int(starts[row]), int(starts[row + 1]), int(lengths[row])
        first = kv_len - (end - begin)
        place = first
        for low, high in own:
            if high <= first or low >= kv_len:
                continue
            assert high <= kv_len, (own, first, kv_len)
            low = max(low, first)
            if low > place:
                causal.append(_Piece(row, begin + place - first, begin + low - first, low))
            mutual.append(_Piece(row, begin + low - first, begin + high - first, high))
            place = high
        if place < kv_len:
            causal.append(_Piece(row, begin + place - first, end, kv_len))
    if not mutual:
        return plan
    parts = MutualPlans(causal=_part(plan, causal) if causal else None, mutual=_part(plan, mutual))
    return replace(plan, mutual=parts)


def _part(plan: AttentionPlan, pieces: list[_Piece]) -> PlanPart:
    """A plan whose rows are the pieces, those of one token first."""
    pieces = sorted(pieces, key=lambda one: one.end - one.begin != 1)
    device = plan.slot_T.device
    counts = np.array([one.end - one.begin for one in pieces], np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    lengths = np.array([one.kv_len for one in pieces], np.int32)
    at_T = torch.from_numpy(np.concatenate([np.arange(p.begin, p.end) for p in pieces])).to(device)
    row_R = torch.tensor([one.row for one in pieces], device=device)
    own = AttentionPlan(
        query_start_R1=torch.from_numpy(starts).to(device),
        kv_len_R=torch.from_numpy(lengths).to(device),
        block_table_RB=plan.block_table_RB.index_select(0, row_R),
        slot_T=plan.slot_T.index_select(0, at_T),
        host_query_start=starts,
        host_kv_len=lengths,
        num_decodes=int((counts == 1).sum()),
        max_query_len=int(counts.max()),
        max_kv_len=int(lengths.max()),
    )
    return PlanPart(at_T=at_T, plan=own)

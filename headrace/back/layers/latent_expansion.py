"""Which rows of a step attend over keys and values expanded from their latents, and which over the
latents themselves.

Expanded, every position of a row costs a product with the heads' key and value weights once, and
every pair of a query and a position a third of the operations: it pays where a position is seen by
many queries. The choice is made from the step's sizes on the host. A step that may be recorded has
none there: of one whose prompts begin in it, the positions are its own tokens; another stays as it
is; those of Kernel.host_pairs are not recorded.

S positions of all rows that are expanded, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.plan import AttentionPlan
from headrace.back.kernels.attention.triton_lists import lists
from headrace.back.kernels.latent_write.quantized import dequantized, values_and_scales

LEAST_QUERIES = {"cuda": 24, "cpu": 96}
"""Queries that see a position, on average over the positions, from which on it is expanded, by the
kind of device. With 16 heads on an H200, the whole layer's attention absorbed and expanded, us: 16
rows of 512 positions with 8 queries each 49 and 111, with 32 115 and 113; 64 queries of a row of 64
22 and 21, of 8,192 607 and 193; a prompt of 1,024 253 and 41, of 8,192 10,820 and 578. On two cores
with AVX-512, bfloat16, ms: 96 queries of a row of 1,024 14 and 12, 256 of 2,048 68 and 52; a prompt
of 128 4.1 and 1.7, of 512 31 and 12, of 1,024 93 and 36."""
MOST_BYTES = 512 << 20
"""Of keys and values of the positions of a step that are expanded; with more they stay absorbed."""


@dataclass(frozen=True, kw_only=True)
class ExpandedRows:
    """`first`: the token from which on rows are expanded; `decodes`: the plan of the rows before,
    if any; `decode_T11`: which of the tokens before `first` these are, None: all; `row_S`: where
    each position lies in the cache, in rows of a latent, or of quantized ones in slots; `begin_R`:
    a row's first position among S."""

    first: int
    decodes: AttentionPlan | None
    row_S: torch.Tensor
    begin_R: torch.Tensor
    decode_T11: torch.Tensor | None = None


def expanded_rows(
    plan: AttentionPlan, kv: torch.Tensor, owner: object, position_bytes: int
) -> ExpandedRows | None:
    """The rows of this step that are expanded, None if there are none. Made once a step, by the
    first owner that asks. position_bytes: of the keys and values of a position."""
    if plan.whole_prompts:
        if len(plan.slot_T) * position_bytes > MOST_BYTES:
            return None
        whole = ("whole prompts", kv.stride(0), kv.shape[1])
        return lists.get(plan, whole, owner, lambda: _whole_prompts(plan, kv))[0]
    if plan.host_query_start is None or plan.host_kv_len is None:
        return None
    first_row = plan.num_decodes
    queries = plan.host_query_start[first_row + 1 :] - plan.host_query_start[first_row:-1]
    lengths = plan.host_kv_len[first_row:]
    positions = int(lengths.sum())
    if not 0 < positions * position_bytes <= MOST_BYTES:
        return None
    if int((queries * lengths).sum()) < LEAST_QUERIES[kv.device.type] * positions:
        return None
    key = ("expanded rows", kv.stride(0), kv.shape[1])
    return lists.get(plan, key, owner, lambda: _rows_of(plan, kv, positions))[0]


def _rows_of(plan: AttentionPlan, kv: torch.Tensor, positions: int) -> ExpandedRows:
    assert plan.host_query_start is not None and plan.host_kv_len is not None
    first_row, device = plan.num_decodes, kv.device
    block_tokens = kv.shape[1]
    length_R = plan.kv_len_R.long()
    length_R[:first_row] = 0
    begin_R = length_R.cumsum(0) - length_R
    rows = torch.arange(len(length_R), device=device)
    row_S = torch.repeat_interleave(rows, length_R, output_size=positions)
    position_S = torch.arange(positions, device=device) - begin_R[row_S]
    block_S = plan.block_table_RB[row_S, position_S // block_tokens].long()
    decodes = None
    if first_row:
        decodes = replace(
            plan,
            query_start_R1=plan.query_start_R1[: first_row + 1],
            kv_len_R=plan.kv_len_R[:first_row],
            block_table_RB=plan.block_table_RB[:first_row],
            host_query_start=plan.host_query_start[: first_row + 1],
            host_kv_len=plan.host_kv_len[:first_row],
            max_query_len=1,
        )
    return ExpandedRows(
        first=int(plan.host_query_start[first_row]),
        decodes=decodes,
        row_S=_cache_rows(kv, block_S * block_tokens + position_S % block_tokens),
        begin_R=begin_R.int(),
    )


def _whole_prompts(plan: AttentionPlan, kv: torch.Tensor) -> ExpandedRows:
    """Of a bucket's step: nothing is asked of the device. Rows with one query come first."""
    count = min(len(plan.kv_len_R), len(plan.slot_T))
    start_R1 = plan.query_start_R1
    num_decodes = (start_R1.diff() == 1).sum(dtype=torch.int32)
    is_decode_R = torch.arange(count, device=kv.device) < num_decodes
    # What lies behind the last row is weighed with 0 and must be a number: padding's latents are
    # not always, the first token's are.
    is_token_T = torch.arange(len(plan.slot_T), device=kv.device) < start_R1[-1]
    decodes = replace(
        plan,
        query_start_R1=torch.minimum(start_R1[: count + 1], num_decodes),
        kv_len_R=torch.where(is_decode_R, plan.kv_len_R[:count], 0),
        block_table_RB=plan.block_table_RB[:count],
        num_decodes=count,
        max_query_len=1,
        whole_prompts=False,
    )
    return ExpandedRows(
        first=count,
        decodes=decodes,
        row_S=_cache_rows(kv, torch.where(is_token_T, plan.slot_T, plan.slot_T[:1])),
        begin_R=start_R1[:-1],
        decode_T11=is_decode_R[:, None, None],
    )


def _cache_rows(kv: torch.Tensor, slot_S: torch.Tensor) -> torch.Tensor:
    """Where these slots lie: see ExpandedRows."""
    _, block_tokens, width = kv.shape
    if kv.dtype is torch.int8:
        return slot_S
    assert kv.stride(0) % width == 0, kv.stride()
    return slot_S // block_tokens * (kv.stride(0) // width) + slot_S % block_tokens


def latents_of(
    rows: ExpandedRows, kv: torch.Tensor, rank: int, form: str | None, dtype: torch.dtype
) -> torch.Tensor:
    """latent_SW: those of all positions, of a cache quantized as `form`; None: it is not."""
    if form is not None:
        block_S, place_S = rows.row_S // kv.shape[1], rows.row_S % kv.shape[1]
        values, scales = (part[block_S, place_S] for part in values_and_scales(kv))
        return dequantized(values, scales, rank, form, dtype)
    num_blocks, block_tokens, width = kv.shape
    count = (num_blocks - 1) * (kv.stride(0) // width) + block_tokens
    return kv.as_strided((count, width), (width, 1)).index_select(0, rows.row_S)

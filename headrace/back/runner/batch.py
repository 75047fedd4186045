"""From a plan and the rows to one step's `Batch`: built anew each step, without a Python loop over
rows.

T query tokens, R rows, N rows that are sampled, B blocks of the longest row. Host cost at 32 decode
rows: under 100 us (tests/back/runner/test_batch.py counts the operations; benchmarks measure the
time).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan, AttentionProbe, Batch
from headrace.back.kernels.upload import to_device
from headrace.back.runner.requests import Rows
from headrace.back.sampling.top_candidates import SamplerInput
from headrace.base.wire.step import StepPlan


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The host's view of a step, all from the plan alone.

    rows [R] int64; query_start [R+1], kv_len [R] int32; row_T, position_T [T] int64;
    sampled [N] int64: indices into the plan's rows; sampled_row, sampled_position [N]: the row, and
    the position the sampled token will have; place [N]: where each is among what a bucket's step
    place: its row, or, if the step `verifies` drafts, its query token. needs: what the step has to
    leave for the sampler; every: somebody wants the hidden states of all tokens, not only of each
    row's last.
    """

    rows: np.ndarray
    query_start: np.ndarray
    kv_len: np.ndarray
    row_T: np.ndarray
    position_T: np.ndarray
    sampled: np.ndarray
    sampled_row: np.ndarray
    sampled_position: np.ndarray
    place: np.ndarray
    num_decodes: int
    max_query_len: int
    max_kv_len: int
    needs: SamplerInput = "logits"
    every: bool = False
    verifies: bool = False


def shape_of(plan: StepPlan) -> StepShape:
    """Works out lengths, positions and the rows to sample.

    On the way from one step to the next: no reduction of numpy here, which gives up the
    interpreter's lock however few elements it has. The core's thread, woken by the last result,
    then takes it and keeps it for 300 us.
    """
    rows = plan.rows.astype(np.int64)
    query_start = np.zeros(rows.size + 1, np.int32)
    np.cumsum(plan.num_tokens, out=query_start[1:])
    kv_len = plan.num_computed + plan.num_tokens
    if plan.drafts.size:
        return _verifying(plan, rows, query_start, kv_len)
    num_decodes = int(np.count_nonzero(plan.num_tokens == 1))
    if num_decodes == rows.size:
        row_T, position_T = rows, plan.num_computed.astype(np.int64)
    else:
        assert (plan.num_tokens[:num_decodes] == 1).all(), "rows with one token come first"
        row_T = np.repeat(rows, plan.num_tokens)
        offset = np.repeat(plan.num_computed - query_start[:-1], plan.num_tokens)
        position_T = np.arange(query_start[-1], dtype=np.int64) + offset
    sampled = np.flatnonzero(plan.sample)
    return StepShape(
        rows=rows,
        query_start=query_start,
        kv_len=kv_len,
        row_T=row_T,
        position_T=position_T,
        sampled=sampled,
        sampled_row=rows[sampled],
        sampled_position=kv_len[sampled].astype(np.int64),
        place=sampled,
        num_decodes=num_decodes,
        max_query_len=max(plan.num_tokens.tolist()),
        max_kv_len=max(kv_len.tolist()),
    )


def _verifying(
    plan: StepPlan, rows: np.ndarray, query_start: np.ndarray, kv_len: np.ndarray
) -> StepShape:
    """A step with drafts: all rows decode, and each query token is sampled."""
    row_T = np.repeat(rows, plan.num_tokens)
    place = np.arange(query_start[-1], dtype=np.int64)
    position_T = place + np.repeat(plan.num_computed - query_start[:-1], plan.num_tokens)
    return StepShape(
        rows=rows,
        query_start=query_start,
        kv_len=kv_len,
        row_T=row_T,
        position_T=position_T,
        sampled=np.repeat(np.arange(rows.size), plan.num_tokens),
        sampled_row=row_T,
        sampled_position=position_T + 1,
        place=place,
        num_decodes=0,
        max_query_len=max(plan.num_tokens.tolist()),
        max_kv_len=max(kv_len.tolist()),
        verifies=True,
    )


def build_batch(
    shape: StepShape,
    rows: Rows,
    *,
    kv: tuple[torch.Tensor, ...],
    group_of_layer: tuple[int, ...],
    probe: AttentionProbe | None = None,
) -> Batch:
    """The batch of one step; the rows have taken the plan over already.

    Indices are computed on the host, where a small operation costs half a microsecond; the device
    gathers with them.
    """
    row_R = to_device(shape.rows, rows.device)
    last_N = shape.query_start[1:][shape.sampled].astype(np.int64) - 1
    return Batch(
        token_ids_T=rows.tokens.take(shape.row_T, shape.position_T).to(torch.int64),
        positions_T=to_device(shape.position_T, rows.device),
        plans=_plans(shape, rows, row_R),
        group_of_layer=group_of_layer,
        kv=kv,
        logits_at_N=to_device(last_N, rows.device),
        row_R=row_R,
        query_start=shape.query_start,
        probe=probe,
    )


def _plans(shape: StepShape, rows: Rows, row_R: torch.Tensor) -> tuple[AttentionPlan, ...]:
    """One attention plan per KV group; what does not depend on the group is shared between them."""
    query_start_R1 = to_device(shape.query_start, rows.device)
    kv_len_R = to_device(shape.kv_len, rows.device)
    num_blocks = -(-shape.max_kv_len // rows.block_tokens)
    block_T = shape.position_T // rows.block_tokens
    offset_T = to_device(shape.position_T - block_T * rows.block_tokens, rows.device)
    plans = []
    for table in rows.tables:
        table.reserve(num_blocks)
        block_id_T = table.take(shape.row_T, block_T)
        plans.append(
            AttentionPlan(
                query_start_R1=query_start_R1,
                kv_len_R=kv_len_R,
                block_table_RB=table.data[:, :num_blocks].index_select(0, row_R),
                slot_T=torch.add(offset_T, block_id_T, alpha=rows.block_tokens),
                host_query_start=shape.query_start,
                host_kv_len=shape.kv_len,
                num_decodes=shape.num_decodes,
                max_query_len=shape.max_query_len,
                max_kv_len=shape.max_kv_len,
            )
        )
    return tuple(plans)

"""Steps of exactly their own size, run at once: every step of devices without graphs, and steps of
others whose kernels or model read something on the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan, AttentionProbe, Batch, HiddenTaps
from headrace.back.kernels.upload import to_device, to_host
from headrace.back.lora.rows import with_slots
from headrace.back.runner.batch import GrowingTable, Rows, StepShape
from headrace.back.runner.results import (
    AwaitMasks,
    DeviceEvent,
    PassedEvent,
    StepEvent,
    StepOutputs,
    StepTensors,
    recorded,
)
from headrace.back.runner.steps import StepResources, TakeMasks
from headrace.back.sampling.in_step import SamplerInput
from headrace.base.config.resolved import Decision
from headrace.base.wire.step import RecordedGraphs, StepPlan

LEAST_WHOLE = 256
"""Tokens of such prompts, on average over the tokens, from which on they are expanded in recorded
steps: of fewer the products of expansion take as long as they spare."""


class ExactSteps:
    """`Steps`; see the top of the file."""

    max_drafts = 0
    verify = None
    common_rows: tuple[int, ...] = ()
    distinct_rows: tuple[int, ...] = ()

    def __init__(
        self,
        resources: StepResources,
        rows: Rows,
        why: str = "",
        *,
        taps: HiddenTaps | None = None,
    ) -> None:
        self.rows = rows
        self._taps = taps
        self.batch: Batch | None = None
        self._resources = resources
        why = why or "the host runs each step itself"
        self.decisions: tuple[Decision, ...] = (
            (Decision("graphs", "auto", "off", why),) if resources.device.type != "cpu" else ()
        )

    @property
    def graphs(self) -> RecordedGraphs:
        """See Steps."""
        return RecordedGraphs()

    def record_next(self) -> None:
        """See Steps."""

    def scope(self) -> AbstractContextManager[object]:
        """See Steps."""
        return nullcontext()

    def compiling(self) -> None:
        """See Steps."""

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """See Steps."""
        self.rows.begin(plan)
        return plan

    def commit(
        self, shape: StepShape, token_N: torch.Tensor, max_logit_N: torch.Tensor
    ) -> np.ndarray:
        """See Steps."""
        token_N = token_N.to(torch.int32)
        self.rows.append(shape.sampled_row, shape.sampled_position, token_N)
        return to_host(token_N).numpy()

    def run(
        self,
        plan: StepPlan,
        shape: StepShape,
        *,
        take_masks: TakeMasks,
        probe: AttentionProbe | None = None,
    ) -> StepOutputs:
        """See Steps."""
        if plan.block_id.size:
            self.rows.update(plan)
        self.rows.tokens.reserve(shape.max_kv_len + 1)
        hidden_TE = self.forward(shape, probe)
        if not shape.sampled.size:
            return StepOutputs(out=StepTensors(hidden_TE=hidden_TE))
        every = shape.sampled.size == hidden_TE.shape[0]
        assert self.batch is not None
        logits_NV = self._resources.model.logits(
            hidden_TE if every else hidden_TE.index_select(0, self.batch.logits_at_N)
        )
        argmax = self._resources.greedy(logits_NV)
        return StepOutputs(out=StepTensors(hidden_TE=hidden_TE, logits_RV=logits_NV, argmax=argmax))

    def forward(self, shape: StepShape, probe: AttentionProbe | None = None) -> torch.Tensor:
        """The model over the tokens of a step, whose blocks the rows have; its `batch` stays."""
        resources = self._resources
        batch = build_batch(
            shape, self.rows, kv=resources.kv, group_of_layer=resources.group_of_layer, probe=probe
        )
        if shape.slots is not None:
            batch = with_slots(batch, shape.slots, shape.query_start)
        taps = self._taps if probe is None or probe.taps is None else probe.taps
        self.batch = batch = replace(resources.state.prepare(batch, shape), taps=taps)
        resources.state.before(batch)
        hidden_TE = self._forward(batch, probe)
        resources.state.after(batch, hidden_TE)
        return hidden_TE

    def _forward(self, batch: Batch, probe: AttentionProbe | None) -> torch.Tensor:
        if probe is None:
            return self._resources.model.forward(batch)
        probe.begin()
        hidden_TE = self._resources.model.forward(batch)
        probe.end()
        return hidden_TE

    def event(self) -> StepEvent:
        """See Steps."""
        if self._resources.device.type == "cpu":
            return PassedEvent()
        return DeviceEvent((recorded(),))

    def finish(self, plan: StepPlan, shape: StepShape) -> None:
        """See Steps."""


def whole_prompts(shape: StepShape) -> bool:
    """Whether the rows with several query tokens, of which there are some, have none before them,
    and steps of these sizes are recorded with what is expanded from latents."""
    starts = shape.query_start[shape.num_decodes :].tolist()
    counts = [end - start for start, end in pairwise(starts)]
    whole = counts == shape.kv_len[shape.num_decodes :].tolist()
    enough = 0 < LEAST_WHOLE * sum(counts) <= shape.prompt_pairs
    return whole and enough


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
    places = {
        group.tokens: _places(shape.position_T, group.tokens, rows.device) for group in rows.groups
    }
    plans = []
    for table, group in zip(rows.tables, rows.groups, strict=True):
        if group.span:
            plans.append(_cross_plan(shape, rows, table, row_R, query_start_R1))
            continue
        num_blocks = -(-shape.max_kv_len // group.tokens)
        block_T, offset_T = places[group.tokens]
        table.reserve(num_blocks)
        block_id_T = table.take(shape.row_T, block_T)
        plans.append(
            AttentionPlan(
                query_start_R1=query_start_R1,
                kv_len_R=kv_len_R,
                block_table_RB=table.data[:, :num_blocks].index_select(0, row_R),
                slot_T=torch.add(offset_T, block_id_T, alpha=group.tokens),
                host_query_start=shape.query_start,
                host_kv_len=shape.kv_len,
                num_decodes=shape.num_decodes,
                max_query_len=shape.max_query_len,
                max_kv_len=shape.max_kv_len,
            )
        )
    return tuple(plans)


def _places(
    position_T: np.ndarray, block_tokens: int, device: torch.device
) -> tuple[np.ndarray, torch.Tensor]:
    """The column of each position in block tables, and on the device its place in the block."""
    block_T = position_T // block_tokens
    return block_T, to_device(position_T - block_T * block_tokens, device)


def _cross_plan(
    shape: StepShape,
    rows: Rows,
    table: GrowingTable,
    row_R: torch.Tensor,
    query_start_R1: torch.Tensor,
) -> AttentionPlan:
    """Of cross caches: each row has its encoder's outputs, to which the step adds nothing."""
    kv_len = rows.cross_tokens[shape.rows]
    longest = max(kv_len.tolist())
    num_blocks = max(1, -(-longest // rows.block_tokens))
    table.reserve(num_blocks)
    return AttentionPlan(
        query_start_R1=query_start_R1,
        kv_len_R=to_device(kv_len, rows.device),
        block_table_RB=table.data[:, :num_blocks].index_select(0, row_R),
        slot_T=torch.zeros(shape.row_T.size, dtype=torch.int64, device=rows.device),
        host_query_start=shape.query_start,
        host_kv_len=kv_len,
        num_decodes=shape.num_decodes,
        max_query_len=shape.max_query_len,
        max_kv_len=num_blocks * rows.block_tokens,
    )

"""Runs steps on one rank: plan -> rows -> batch -> model -> sampler -> result. Knows no model family.

The runner owns what outlives a step: the rows, the KV memory, the sampler's state and the model's `ModelState`. There
is one execute path; warm-up and self-check go through it with made-up plans (warmup.py).

T query tokens, R rows of the step, N rows sampled, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.back.models.protocol import CausalModel
from headrace.back.runner.batch import StepShape, build_batch, shape_of
from headrace.back.runner.memory import KVMemory, count_blocks, lay_out
from headrace.back.runner.requests import Rows, to_device
from headrace.back.runner.results import to_result
from headrace.back.runner.states.plain import PlainDecoder
from headrace.back.runner.states.state import ModelState
from headrace.back.runner.warmup import warm_up
from headrace.back.sampling.prompt_logprobs import PromptScorer
from headrace.back.sampling.sampler import Sampled, Sampler
from headrace.base.config.resolved import Decision, EngineSpec
from headrace.base.errors import HeadraceError
from headrace.base.wire.grammar import GATE
from headrace.base.wire.request import PromptLogprobs
from headrace.base.wire.step import StepPlan, StepResult, WorkerFacts

Supplied = Callable[[int], dict[str, bytes]]
"""From the number of a step to its late payloads."""


def no_supply(step: int) -> dict[str, bytes]:
    """For callers whose plans have no late gates."""
    raise AssertionError(f"step {step} waits for gates, but nobody supplies them")


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """One rank's share of the engine. Plans must come in order; each is executed to its end before the next.

    Invariants: a row's tokens and block tables are what the plans so far have said, plus the tokens sampled here;
    block 0 is never given to a request.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: CausalModel,
        *,
        device: torch.device,
        state: ModelState | None = None,
        weight_bytes: int = 0,
        decisions: Sequence[Decision] = (),
        start_s: dict[str, float] | None = None,
    ) -> None:
        self._model = model
        self._state = state or PlainDecoder()
        layout = lay_out(
            model.kv_layers, block_tokens=spec.kv.block_tokens, dtype=_DTYPES[spec.model.dtype]
        )
        num_blocks = count_blocks(spec.kv, layout)
        self._kv = KVMemory(model.kv_layers, layout, num_blocks=num_blocks, device=device)
        groups = layout.group_of_layer
        self._group_of_layer = tuple(groups[layer] for layer in range(len(groups)))
        max_rows = spec.scheduler.max_running
        self._rows = Rows(
            max_rows=max_rows,
            num_groups=len(layout.groups),
            block_tokens=spec.kv.block_tokens,
            device=device,
        )
        self._sampler = Sampler(max_rows=max_rows, logits_width=model.logits_width, device=device)
        self._prompts = PromptScorer(logits_width=model.logits_width, device=device)
        warmup_s = warm_up(self, spec, model.logits_width, device)
        self.facts = WorkerFacts(
            num_blocks=num_blocks,
            block_tokens=spec.kv.block_tokens,
            groups=layout.groups,
            logits_width=model.logits_width,
            max_rows=max_rows,
            max_model_len=spec.model.max_model_len,
            weight_bytes=weight_bytes,
            kv_bytes=self._kv.num_bytes,
            start_s={**(start_s or {}), "warmup": warmup_s},
            decisions=[
                (d.field, d.given, d.chosen, d.why) for d in (*decisions, *self._sampler.decisions)
            ],
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan, supplied: Supplied = no_supply) -> StepResult:
        """Runs one step and returns what it produced. `supplied` waits for the payloads of the plan's `late` gates;
        it is called when all that does not depend on them is on its way."""
        self._apply(plan)
        if not plan.rows.size:
            return StepResult(step=plan.step, tokens=np.empty(0, np.int32))
        shape = shape_of(plan)
        self._rows.tokens.reserve(shape.max_kv_len + 1)
        hidden_TE, logits_at_N = self._forward(plan, shape)
        prompts, refused = ([], {}) if self._prompts.idle else self._score_prompts(shape, hidden_TE)
        sampled = self._sample(plan, shape, hidden_TE, logits_at_N, supplied)
        if sampled is not None and sampled.failed:
            self._scrub(shape.sampled_row[list(sampled.failed)])
        return to_result(plan, shape, sampled, prompts, refused)

    def _apply(self, plan: StepPlan) -> None:
        if plan.ends.size:
            self._state.end(plan.ends)
            self._sampler.end(plan.ends)
            self._prompts.end(plan.ends)
        self._rows.apply(plan)
        for start in plan.starts:
            self._state.start(start)
            self._sampler.start(start)
            self._prompts.start(start)

    def _forward(self, plan: StepPlan, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, E], and which of them are wanted, int64 [N]."""
        batch = build_batch(
            shape, self._rows, kv=self._kv.layers, group_of_layer=self._group_of_layer
        )
        batch = self._state.prepare(batch, row_T=shape.row_T, gates=plan.gates)
        hidden_TE = self._model.forward(batch)
        self._state.after(batch, hidden_TE)
        return hidden_TE, batch.logits_at_N

    def _sample(
        self,
        plan: StepPlan,
        shape: StepShape,
        hidden_TE: torch.Tensor,
        logits_at_N: torch.Tensor,
        supplied: Supplied,
    ) -> Sampled | None:
        """Samples the rows that the plan wants sampled and stores their tokens for the next step."""
        logits_NV = None
        if shape.sampled.size:
            every = shape.sampled.size == hidden_TE.shape[0]
            logits_NV = self._model.logits(
                hidden_TE if every else hidden_TE.index_select(0, logits_at_N)
            )
        late = supplied(plan.step) if plan.late else {}
        if logits_NV is None:
            return None
        sampled = self._sampler.sample(
            logits_NV,
            rows=shape.sampled_row,
            positions=shape.sampled_position,
            tokens=self._rows.tokens.data,
            masks=late.get(GATE, b""),
        )
        self._rows.tokens.put(
            shape.sampled_row, shape.sampled_position, sampled.token_N.to(torch.int32)
        )
        return sampled

    def _score_prompts(
        self, shape: StepShape, hidden_TE: torch.Tensor
    ) -> tuple[list[tuple[int, PromptLogprobs]], dict[int, HeadraceError]]:
        """The prompt log-probabilities this step gives, and the rows refused, by index into the plan's rows."""
        found, refused = [], {}
        for index, row in enumerate(shape.rows.tolist()):
            if (refusal := self._prompts.refusal(row)) is not None:
                refused[index] = refusal
                continue
            start, stop = shape.query_start[index : index + 2].tolist()
            scores = self._prompts.score(
                row,
                hidden_TE[start:stop],
                first=int(shape.position_T[start]),
                logits=self._model.logits,
            )
            if scores is not None:
                found.append((index, scores))
        return found, refused

    def _scrub(self, rows: np.ndarray) -> None:
        """Removes NaN and Inf from the blocks of failed rows, the null block included."""
        row_K = to_device(rows, self._rows.device)
        blocks = [table.data.index_select(0, row_K).view(-1) for table in self._rows.tables]
        self._kv.scrub(torch.cat(blocks).unique().to(torch.int64))

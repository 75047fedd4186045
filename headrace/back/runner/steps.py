"""How a step's tensors are made and run: the seam behind which devices differ. The runner knows
only `Steps`.

Steps of exactly their own size, run at once: exact_steps.py. Steps of fixed sizes that are
replayed: buckets.py, cuda_graphs.py, cpu_graphs.py.

What a step leaves says who chooses its tokens: the rows of `token_choices`.

T query tokens, N rows sampled, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace.back.attention.plan import AttentionProbe
from headrace.back.kernels.greedy.op import Greedy
from headrace.back.kernels.step_inputs.op import GroupBlocks
from headrace.back.kernels.upload import to_host
from headrace.back.lora.rows import RowSlots
from headrace.back.models.protocol import CausalModel, TopOf
from headrace.back.runner.batch import Rows, StepShape
from headrace.back.runner.results import (
    AwaitMasks,
    ChoiceInStep,
    ProposedDrafts,
    SampledTokens,
    StepEvent,
    StepOutputs,
    StepTensors,
)
from headrace.back.runner.states.state import ModelState
from headrace.back.sampling.features import SampledRows
from headrace.back.sampling.in_step import HeadOutput, SamplerInput, StepSampler
from headrace.back.sampling.sampler import Sampled, Sampler
from headrace.back.speculative.network import DraftNetwork
from headrace.base.config.resolved import Decision
from headrace.base.wire.step import RecordedGraphs, StepPlan

TakeMasks = Callable[[], None]
"""Waits for the grammar masks of a step and puts them where it reads them, behind what the device
was given so far."""


Commit = Callable[[StepShape, torch.Tensor, torch.Tensor], np.ndarray]
"""See Steps.commit."""


@dataclass(frozen=True, kw_only=True)
class StepResources:
    """What steps are run with. kv: layer -> its cache; group_of_layer: layer -> index of its KV
    group. sample: samples within steps; None: this device's steps only take the argmax. groups: see
    Rows. slots: of the rows' adapters, where the model takes any. network: what drafts, where that
    has weights: its caches lie in `kv` behind the model's, from `model_caches` on. sampler: of
    steps that sample several times. rates: with which drafts stand (synthetic.py); none: as the
    model says."""

    model: CausalModel
    state: ModelState
    greedy: Greedy
    kv: tuple[torch.Tensor, ...]
    group_of_layer: tuple[int, ...]
    device: torch.device
    slots: RowSlots | None = None
    sample: StepSampler | None = None
    groups: tuple[GroupBlocks, ...] = ()
    network: DraftNetwork | None = None
    model_caches: int = 0
    sampler: Sampler | None = None
    rates: tuple[float, ...] = ()


def head_shortcuts(model: CausalModel) -> dict[HeadOutput, TopOf]:
    """What the model's head gives without whole rows of logits."""
    ways = {HeadOutput.ARGMAX: model.argmax, HeadOutput.TOP_CANDIDATES: model.top_candidates}
    return {head: way for head, way in ways.items() if way is not None}


class Steps(Protocol):
    """Runs steps in order."""

    rows: Rows
    decisions: tuple[Decision, ...]
    common_rows: tuple[int, ...]
    """Numbers of decodes that are worth running at start, largest first."""
    distinct_rows: tuple[int, ...]
    """Those of them that take all kernels between them."""
    max_drafts: int
    """Drafts of a row that a step can verify."""

    @property
    def graphs(self) -> RecordedGraphs:
        """What is recorded of steps."""
        ...

    def record_next(self) -> None:
        """Records the step that was needed most of those that are not recorded. Nothing is in
        flight."""
        ...

    def scope(self) -> AbstractContextManager[object]:
        """All work of the runner happens within it: the stream, where the device has streams."""
        ...

    def compiling(self) -> AbstractContextManager[object] | None:
        """Within it steps compile their kernels, many at a time, and compute nothing; what they
        tell is made up. None: there is nothing to compile."""
        ...

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """Takes over the rows that the plan starts and feeds; the plan as it can be run, which may
        have fewer drafts and exact positions. `needs`: see StepShape. `masks` is called where
        drafts must be allowed by them."""
        ...

    def run(
        self,
        plan: StepPlan,
        shape: StepShape,
        *,
        take_masks: TakeMasks,
        probe: AttentionProbe | None = None,
    ) -> StepOutputs:
        """Launches the step of a plan that has begun. With a probe the step is exact. `take_masks`
        is called by steps that apply grammar masks themselves."""
        ...

    def commit(
        self, shape: StepShape, token_N: torch.Tensor, max_logit_N: torch.Tensor
    ) -> np.ndarray:
        """What the host's sampler has chosen goes into the rows; its copy for the host int32 [N].
        max_logit_N float32: the model's greatest logits."""
        ...

    @property
    def verify(self) -> Commit | None:
        """`commit` of a step that verifies drafts: with marks in place of what does not stand (op
        step_verify). None: these steps have no drafts."""
        ...

    def event(self) -> StepEvent:
        """The point behind everything that has been launched."""
        ...

    def finish(self, plan: StepPlan, shape: StepShape) -> ProposedDrafts | None:
        """The rows have the tokens of the step that ran last: what is kept of it for later drafts;
        behind a step that waited for masks, what its rows are to verify next. Its tensors may be
        overwritten."""
        ...


class TokenChoice(Protocol):
    """A way to choose the tokens of a step that was launched: a row of `token_choices`."""

    def takes(self, shape: StepShape, outputs: StepOutputs) -> bool:
        """Whether the step has left what this way needs."""
        ...

    def choose(self, shape: StepShape, outputs: StepOutputs, masks: AwaitMasks) -> SampledTokens:
        """The tokens of the sampled rows, which have them when this returns; in a step that
        verifies drafts with marks in place of what does not stand. `masks` waits for the payload of
        the grammars; a step that chooses itself has taken it already."""
        ...


def token_choices(
    sampler: Sampler, steps: Steps, logits: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[TokenChoice, ...]:
    """All ways; the first that takes a step's outputs is the one. `logits`: of hidden states."""
    by_host = (AmongCandidates(sampler, steps.rows, logits), FromLogits(sampler, steps.rows))
    return (
        ChoiceInStep(sampler),
        *(ChoiceByHost(way, steps.commit) for way in by_host),
        *(ChoiceByHost(way, steps.verify, verifies=True) for way in by_host if steps.verify),
    )


class ChoiceByHost:
    """The host samples, and the rows take that by `commit`: as it is, or what stands of it where
    the step `verifies` drafts."""

    def __init__(self, way: HostSampling, commit: Commit, *, verifies: bool = False) -> None:
        self._way, self._commit, self._verifies = way, commit, verifies

    def takes(self, shape: StepShape, outputs: StepOutputs) -> bool:
        """See TokenChoice."""
        return shape.verifies is self._verifies and self._way.takes(outputs.out)

    def choose(self, shape: StepShape, outputs: StepOutputs, masks: AwaitMasks) -> SampledTokens:
        """See TokenChoice."""
        sampled = self._way.sample(shape, outputs, masks)
        chosen_logit_N = sampled.chosen_logit_N
        return SampledTokens(
            tokens=self._commit(shape, sampled.token_N, sampled.max_logit_N),
            max_logit=to_host(sampled.max_logit_N).numpy(),
            chosen_logit=None if chosen_logit_N is None else to_host(chosen_logit_N).numpy(),
            logprobs=sampled.logprobs,
            errors=sampled.errors,
        )


class HostSampling(Protocol):
    """What the host samples from."""

    def takes(self, out: StepTensors) -> bool:
        """Whether that is there."""
        ...

    def sample(self, shape: StepShape, outputs: StepOutputs, masks: AwaitMasks) -> Sampled:
        """A token for each sampled place."""
        ...


class AmongCandidates:
    """Each row's best tokens (sampling/top_candidates.py). No row has a mask: of those the step
    leaves logits. `logits`: of hidden states."""

    def __init__(
        self, sampler: Sampler, rows: Rows, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._sampler, self._rows, self._logits = sampler, rows, logits

    def takes(self, out: StepTensors) -> bool:
        """See HostSampling."""
        return out.top_candidates is not None

    def sample(self, shape: StepShape, outputs: StepOutputs, masks: AwaitMasks) -> Sampled:
        """See HostSampling."""
        return self._sampler.sample_candidates(
            outputs.best(),
            lambda at: self._logits(outputs.hidden(at)),
            **_sampled_rows(shape, self._rows),
        )


class FromLogits:
    """Whole rows of logits, whatever the rows ask for."""

    def __init__(self, sampler: Sampler, rows: Rows) -> None:
        self._sampler, self._rows = sampler, rows

    def takes(self, out: StepTensors) -> bool:
        """See HostSampling."""
        return out.logits_RV is not None

    def sample(self, shape: StepShape, outputs: StepOutputs, masks: AwaitMasks) -> Sampled:
        """See HostSampling."""
        asked = _sampled_rows(shape, self._rows)
        payload = masks()
        return self._sampler.sample(*outputs.wanted(), masks=payload, **asked)


def _sampled_rows(shape: StepShape, rows: Rows) -> SampledRows:
    return {
        "rows": shape.sampled_row,
        "positions": shape.sampled_position,
        "tokens": rows.tokens.data,
    }

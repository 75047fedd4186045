"""A step that was launched: what it leaves, the event behind it on the device, and its result, read
on the host once the device has passed the event.

Nothing here waits before `result` is called, and that may be on another thread than the one that
launches steps.

T query tokens, R rows, N rows sampled, E hidden size, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Protocol

import numpy as np
import torch

from headrace.back.kernels.greedy.op import Argmax
from headrace.back.kernels.step_verify.op import UNDRAFTED
from headrace.back.kernels.upload import to_device
from headrace.back.runner.batch import StepShape
from headrace.back.runner.capture import CapturedWeights
from headrace.back.runner.pooler import Vectors
from headrace.back.sampling.features import failures
from headrace.back.sampling.in_step import StepSamples
from headrace.back.sampling.logprobs import SampledLogprobs, Scored
from headrace.back.sampling.sampler import Sampler
from headrace.back.sampling.top_candidates import TopCandidates
from headrace.base.errors import HeadraceError, to_wire
from headrace.base.wire.step import NO_DRAFTS, RowLogprobs, StepPlan, StepResult

AwaitMasks = Callable[[], memoryview]
"""Waits for the grammar masks of a step; its payload. It may be called again."""


class StepEvent(Protocol):
    """A point in the device's work."""

    def done(self) -> bool:
        """Whether the device has passed it."""
        ...

    def wait(self) -> None:
        """Returns once the device has passed it; EngineDead if the device has failed."""
        ...


class PassedEvent:
    """A moment that has passed: what was asked for is computed when the call returns."""

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class DeviceEvent:
    """The point at which events were recorded."""

    def __init__(self, events: tuple[torch.cuda.Event, ...]) -> None:
        self._events = events

    def done(self) -> bool:
        """See StepEvent."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """See StepEvent. A device that hangs is for the process's watchdog to notice."""
        for event in self._events:
            event.synchronize()


def recorded() -> torch.cuda.Event:
    """An event recorded on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """What a step leaves: hidden states [T, E], or of each row's last token alone, [R, E], and
    padding; and of the N sampled rows, or of all R, logits float32 and the argmax, the argmax
    alone, or the top candidates alone, where every row has one token. Overwritten by the next
    step."""

    hidden_TE: torch.Tensor
    logits_RV: torch.Tensor | None = None
    argmax: Argmax | None = None
    top_candidates: TopCandidates | None = None

    def aliases(self, alias: Callable[[torch.Tensor], torch.Tensor]) -> StepTensors:
        """The same through tensors that `alias` makes of these."""
        argmax, top_candidates = (
            None if pair is None else (alias(pair[0]), alias(pair[1]))
            for pair in (self.argmax, self.top_candidates)
        )
        logits_RV = None if self.logits_RV is None else alias(self.logits_RV)
        return StepTensors(
            hidden_TE=alias(self.hidden_TE),
            logits_RV=logits_RV,
            argmax=argmax,
            top_candidates=top_candidates,
        )


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """A step that was launched.

    index   [N] which of the rows in `out` are sampled; None: `out` is of these alone
    samples what the step itself has sampled, as the rows ask: they have these tokens already. None:
    that is still to
            be done
    """

    out: StepTensors
    index: np.ndarray | None = None
    samples: StepSamples | None = None

    def wanted(self) -> tuple[torch.Tensor, Argmax]:
        """The logits float32 [N, V] and the argmax of the sampled rows."""
        out = self.out
        assert out.logits_RV is not None and out.argmax is not None
        logits, token, value = self._sampled(out.logits_RV, *out.argmax)
        return logits, (token, value)

    def best(self) -> TopCandidates:
        """The top candidates of the sampled rows."""
        assert self.out.top_candidates is not None
        id_NC, value_NC = self._sampled(*self.out.top_candidates)
        return id_NC, value_NC

    def hidden(self, at: np.ndarray) -> torch.Tensor:
        """The hidden states of some of the sampled rows, where every row has one token."""
        assert self.index is not None
        hidden_TE = self.out.hidden_TE
        return hidden_TE.index_select(0, to_device(self.index[at], hidden_TE.device))

    def _sampled(self, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.index is None:
            return values
        count = self.index.size
        if count == self.index[-1] + 1:
            return [value[:count] for value in values]
        at = to_device(self.index, values[0].device)
        return [value.index_select(0, at) for value in values]


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """The host's copies of what was sampled for N rows; `chosen_logit`: see sampler.Sampled.

    `index`: where these rows are, if the copies hold more. `masked`: see in_step.StepSamples.
    `errors`: see Sampled.
    """

    tokens: np.ndarray
    max_logit: np.ndarray
    chosen_logit: np.ndarray | None = None
    logprobs: SampledLogprobs | None = None
    index: np.ndarray | EllipsisType = ...
    masked: bool = False
    errors: Mapping[int, HeadraceError] = field(default_factory=dict)

    def read(self) -> tuple[np.ndarray, dict[int, HeadraceError]]:
        """The tokens int32 [N], and index into them -> why that row has none."""
        max_logit = self.max_logit[self.index]
        chosen_logit = None if self.chosen_logit is None else self.chosen_logit[self.index]
        if self.masked:  # of a row of -inf alone nobody knows whose it is
            chosen_logit = max_logit
            max_logit = np.where(max_logit == -np.inf, np.float32(0.0), max_logit)
        return self.tokens[self.index], (
            failures(max_logit, chosen_logit)
            | dict(self.errors)
            | ({} if self.logprobs is None else self.logprobs.errors())
        )


class ChoiceInStep:
    """The step has chosen, by argmax or as InStepSampling says, and its rows have the tokens; if it
    verifies drafts, it has done that too."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def takes(self, shape: StepShape, outputs: StepOutputs) -> bool:
        """See TokenChoice (steps.py)."""
        return outputs.samples is not None

    def choose(self, shape: StepShape, outputs: StepOutputs, masks: AwaitMasks) -> SampledTokens:
        """See TokenChoice (steps.py)."""
        samples = outputs.samples
        assert samples is not None
        scores, at = samples.scores, shape.place
        return SampledTokens(
            tokens=samples.tokens,
            max_logit=samples.max_logit,
            chosen_logit=samples.chosen_logit,
            logprobs=scores and self._sampler.logprobs(scores, shape.sampled_row, at),
            index=at,
            masked=samples.masked,
        )


@dataclass(frozen=True, kw_only=True)
class AcceptedTokens:
    """What a step's rows have gained: see StepResult. `places` [N]: the how many-th of its row each
    sampled token is; None: each is its row's first."""

    tokens: np.ndarray
    drafted: np.ndarray
    places: np.ndarray | None = None

    def place_of(self, index: int) -> int:
        """Of the sampled token at this index."""
        return 0 if self.places is None else int(self.places[index])


def accepted_of(shape: StepShape, token_N: np.ndarray) -> AcceptedTokens:
    """From the tokens of a step, marked where they do not stand (op step_verify), to its rows'."""
    num_rows = shape.rows.size
    if not shape.verifies:
        tokens = np.full((num_rows, 1), -1, np.int32)
        tokens[shape.sampled, 0] = token_N
        return AcceptedTokens(tokens=tokens, drafted=NO_DRAFTS)
    places = shape.place - shape.query_start[shape.sampled]
    tokens = np.full((num_rows, shape.max_query_len), -1, np.int32)
    tokens[shape.sampled, places] = np.maximum(token_N, -1)
    looked_at = shape.sampled[token_N != UNDRAFTED]
    drafted = np.bincount(looked_at, minlength=num_rows).astype(np.int32) - 1
    return AcceptedTokens(tokens=tokens, drafted=drafted, places=places)


@dataclass(frozen=True, kw_only=True)
class ProposedDrafts:
    """See StepResult.proposed. The tokens are there once the device has passed the event."""

    tokens: np.ndarray
    event: StepEvent

    def read(self) -> np.ndarray:
        """Waits for them."""
        self.event.wait()
        return self.tokens


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """One step on its way.

    `refused` are errors known at launch, by index into plan.rows; `lost` is told the rows whose
    logits were not finite, before their requests end.
    """

    plan: StepPlan
    event: StepEvent = field(default_factory=PassedEvent)
    shape: StepShape | None = None
    sampled: SampledTokens | None = None
    prompts: list[tuple[int, Scored]] = field(default_factory=list)
    pooled: Sequence[Vectors] = ()
    captured: Sequence[CapturedWeights] = ()
    refused: dict[int, HeadraceError] = field(default_factory=dict)
    proposed: ProposedDrafts | None = None
    lost: Callable[[np.ndarray], None] | None = None

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self.event.done()

    def result(self) -> StepResult:
        """Waits for the device; indices of sampled rows become indices into plan.rows, as those of
        `refused` are."""
        self.event.wait()
        failed = dict(self.refused)
        tokens, drafted = np.full((self.plan.rows.size, 1), -1, np.int32), NO_DRAFTS
        logprobs: list[RowLogprobs] = []
        if self.sampled is not None:
            assert self.shape is not None
            token_N, bad = self.sampled.read()
            accepted = accepted_of(self.shape, token_N)
            tokens, drafted = accepted.tokens, accepted.drafted
            tokens[list(failed)] = -1
            bad = {i: bad[i] for i in sorted(bad) if token_N[i] >= 0}
            if bad and self.lost is not None:
                self.lost(self.shape.sampled_row[list(bad)])
            for i, error in bad.items():  # what a row has gained before its first failure stands
                tokens[self.shape.sampled[i], accepted.place_of(i) :] = -1
                failed.setdefault(int(self.shape.sampled[i]), error)
            if self.sampled.logprobs is not None:
                logprobs = [
                    RowLogprobs(
                        int(self.shape.sampled[row.index]),
                        row.ids,
                        row.values,
                        row.rank,
                        accepted.place_of(row.index),
                        row.drawn_among,
                    )
                    for row in self.sampled.logprobs.rows()
                    if tokens[self.shape.sampled[row.index], accepted.place_of(row.index)] >= 0
                ]
        return StepResult(
            step=self.plan.step,
            tokens=tokens,
            drafted=drafted,
            proposed=NO_DRAFTS if self.proposed is None else self.proposed.read(),
            logprobs=logprobs,
            prompt_logprobs=[(index, scored.read()) for index, scored in self.prompts],
            pooled=[pooled for vectors in self.pooled for pooled in vectors.read(failed)],
            captured=[piece.read() for piece in self.captured],
            failed=[(index, to_wire(error)) for index, error in failed.items()],
        )

"""How a step's tensors are made and run: the seam behind which devices differ. The runner knows only `Steps`.

`ExactSteps` builds a batch of exactly the step's size and runs it at once: every CPU step, and steps on other devices
whose kernels or model read something on the host. Steps of fixed sizes that are replayed: buckets.py, graphs.py.

T query tokens, N rows sampled, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace.back.attention.plan import Tap
from headrace.back.kernels.greedy.op import Greedy
from headrace.back.kernels.upload import to_device
from headrace.back.models.protocol import CausalModel
from headrace.back.runner.batch import StepShape, build_batch
from headrace.back.runner.requests import Rows
from headrace.back.runner.states.state import ModelState
from headrace.back.sampling.sampler import Picks
from headrace.back.sampling.step_draw import StepSampler, StepTold
from headrace.back.sampling.tops import Tops
from headrace.base.config.resolved import Decision
from headrace.base.wire.step import StepPlan


class Moment(Protocol):
    """A point in the device's work."""

    def done(self) -> bool:
        """Whether the device has passed it."""
        ...

    def wait(self) -> None:
        """Returns once the device has passed it; EngineDead if the device has failed."""
        ...


class Now:
    """A moment that has passed: what was asked for is computed when the call returns."""

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a step leaves: hidden states [T, E], or of each row's last token alone, [R, E], and padding; and of the N
    sampled rows, or of all R, logits float32 and the greedy picks, the picks alone, or the tops alone, where every row
    has one token. Overwritten by the next step."""

    hidden_TE: torch.Tensor
    logits_RV: torch.Tensor | None = None
    picks: Picks | None = None
    tops: Tops | None = None

    def aliases(self, alias: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
        """The same through tensors that `alias` makes of these."""
        picks, tops = (
            None if pair is None else (alias(pair[0]), alias(pair[1]))
            for pair in (self.picks, self.tops)
        )
        logits_RV = None if self.logits_RV is None else alias(self.logits_RV)
        return Outputs(hidden_TE=alias(self.hidden_TE), logits_RV=logits_RV, picks=picks, tops=tops)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A step that was launched.

    index   [N] which of the rows in `out` are sampled; None: `out` is of these alone
    told    what the step itself has sampled, as the rows ask: they have these tokens already. None: that is still to
            be done
    """

    out: Outputs
    index: np.ndarray | None = None
    told: StepTold | None = None

    def wanted(self) -> tuple[torch.Tensor, Picks]:
        """The logits float32 [N, V] and the picks of the sampled rows."""
        out = self.out
        assert out.logits_RV is not None and out.picks is not None
        logits, token, value = self._sampled(out.logits_RV, *out.picks)
        return logits, (token, value)

    def best(self) -> Tops:
        """The tops of the sampled rows."""
        assert self.out.tops is not None
        id_NC, value_NC = self._sampled(*self.out.tops)
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
class Machine:
    """What steps are run with. kv: layer -> its cache; group_of_layer: layer -> index of its KV group. draw: samples
    within steps; None: this device's steps only pick."""

    model: CausalModel
    state: ModelState
    greedy: Greedy
    kv: tuple[torch.Tensor, ...]
    group_of_layer: tuple[int, ...]
    device: torch.device
    draw: StepSampler | None = None


class Steps(Protocol):
    """Runs steps in order."""

    rows: Rows
    decisions: tuple[Decision, ...]
    common_rows: tuple[int, ...]
    """Numbers of decodes that are worth running at start, largest first."""
    distinct_rows: tuple[int, ...]
    """Those of them that take all kernels between them."""

    def scope(self) -> AbstractContextManager[object]:
        """All work of the runner happens within it: the stream, where the device has streams."""
        ...

    def use_kv(self, kv: tuple[torch.Tensor, ...]) -> None:
        """The KV cache from now on; before the first real step."""
        ...

    def compiling(self) -> AbstractContextManager[object] | None:
        """Within it steps compile their kernels, many at a time, and compute nothing; what they tell is made up. None:
        there is nothing to compile."""
        ...

    def run(self, plan: StepPlan, shape: StepShape, *, tap: Tap | None = None) -> Ran:
        """Takes the plan's changes over and launches its step. With a tap the step is exact."""
        ...

    def moment(self) -> Moment:
        """The point behind everything that has been launched."""
        ...


class ExactSteps:
    """See the top of the file."""

    common_rows: tuple[int, ...] = ()
    distinct_rows: tuple[int, ...] = ()

    def __init__(self, machine: Machine, rows: Rows, why: str = "") -> None:
        self.rows = rows
        self._machine = machine
        self._kv = machine.kv
        why = why or "the host runs each step itself"
        self.decisions: tuple[Decision, ...] = (
            (Decision("graphs", "auto", "off", why),) if machine.device.type != "cpu" else ()
        )

    def scope(self) -> AbstractContextManager[object]:
        """See Steps."""
        return nullcontext()

    def use_kv(self, kv: tuple[torch.Tensor, ...]) -> None:
        """See Steps."""
        self._kv = kv

    def compiling(self) -> None:
        """See Steps."""

    def run(self, plan: StepPlan, shape: StepShape, *, tap: Tap | None = None) -> Ran:
        """See Steps."""
        machine = self._machine
        self.rows.apply(plan)
        self.rows.tokens.reserve(shape.max_kv_len + 1)
        batch = build_batch(
            shape, self.rows, kv=self._kv, group_of_layer=machine.group_of_layer, tap=tap
        )
        batch = machine.state.prepare(batch, row_T=shape.row_T, gates=plan.gates)
        hidden_TE = machine.model.forward(batch)
        machine.state.after(batch, hidden_TE)
        if not shape.sampled.size:
            return Ran(out=Outputs(hidden_TE=hidden_TE))
        every = shape.sampled.size == hidden_TE.shape[0]
        logits_NV = machine.model.logits(
            hidden_TE if every else hidden_TE.index_select(0, batch.logits_at_N)
        )
        picks = machine.greedy(logits_NV)
        return Ran(out=Outputs(hidden_TE=hidden_TE, logits_RV=logits_NV, picks=picks))

    def moment(self) -> Moment:
        """See Steps."""
        if self._machine.device.type == "cpu":
            return Now()
        return DeviceMoment((recorded(),))


class DeviceMoment:
    """The point at which events were recorded."""

    def __init__(self, events: tuple[torch.cuda.Event, ...]) -> None:
        self._events = events

    def done(self) -> bool:
        """See Moment."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """See Moment. A device that hangs is for the process's watchdog to notice."""
        for event in self._events:
            event.synchronize()


def recorded() -> torch.cuda.Event:
    """An event recorded on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event

"""A gated linear recurrence over the rows of a step: `bind(problem)` returns
`f(gate_TE, x_TE, state_ME, rows) -> y_TE`.

Per row and channel, y_t = gate_t * y_(t-1) + (1 - gate_t) * x_t, where y_(-1) is the row's state;
the state becomes the row's last y (minimal gated recurrent unit, Feng et al. 2024, "Were RNNs all
we needed?", equation 5, with gates computed beforehand). gate_TE and x_TE float32 [T, E];
state_ME float32 [M + 1, E], row M for padding; `rows` says which tokens belong to which row.

T query tokens, R rows of the step, M rows of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator


@dataclass(frozen=True, kw_only=True)
class StateTrail:
    """Where the states of a step that verifies drafts go: behind the first token of row i of the
    step into the row's own state, behind token j >= 1 into row first + i * depth + j - 1 of the
    state. Rows before `first` - 1 are the runner's, `first` - 1 is padding's."""

    first: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class ScanRows:
    """row_R int32 or int64 [R]: the runner's row of each row of the step, M for padding;
    query_start_R1 int32 [R + 1]: its first token; padding has none. `decode`: token i is row i's
    only one, and behind the real rows padding's.

    Kernels leave row M of a state alone, and what they return of tokens without a row as it
    comes. `trail`: the state behind every token is kept; None: that behind each row's last."""

    row_R: torch.Tensor
    query_start_R1: torch.Tensor
    decode: bool
    trail: StateTrail | None = None

    def padding(self, state: torch.Tensor) -> int:
        """M: the row of this state that nobody owns."""
        return state.shape[0] - 1 if self.trail is None else self.trail.first - 1

    @property
    def depth(self) -> int:
        """Further states of a row that are kept; 0: none."""
        return 0 if self.trail is None else self.trail.depth

    def states_of_tokens(
        self, num_tokens: int, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T] each: the row of the state that each token begins with, and the one that it
        leaves behind."""
        row_T = self.row_of_token(num_tokens, self.padding(state))
        if self.trail is None:
            return row_T, row_T
        place_T = torch.arange(num_tokens, device=row_T.device)
        ends_R = self.query_start_R1[1:].long()
        index_T = torch.searchsorted(ends_R, place_T, right=True)
        index_T = index_T.clamp(max=ends_R.shape[0] - 1)
        offset_T = place_T - self.query_start_R1.long()[index_T]
        behind_T = self.trail.first + index_T * self.trail.depth + offset_T - 1
        inside_T = row_T != self.padding(state)
        from_T = torch.where(inside_T & (offset_T > 1), behind_T - 1, row_T)
        return from_T, torch.where(inside_T & (offset_T > 0), behind_T, row_T)

    def row_of_token(self, num_tokens: int, padding: int) -> torch.Tensor:
        """int64 [T]: the row of each token, `padding` behind the last. Nothing of it is read on the
        host."""
        row_R = self.row_R.long()
        if self.decode:
            return row_R
        place_T = torch.arange(num_tokens, device=row_R.device)
        ends_R = self.query_start_R1[1:].long()
        index_T = torch.searchsorted(ends_R, place_T, right=True)
        row_T = row_R[index_T.clamp(max=row_R.shape[0] - 1)]
        return torch.where(place_T < ends_R[-1], row_T, padding)


GatedScan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ScanRows], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class GatedScanProblem:
    """The same for every width and number of rows."""

    device: str


def bind_reference(problem: GatedScanProblem) -> GatedScan:
    """The reference, a token at a time; safe in graphs."""

    def gated_scan(
        gate_TE: torch.Tensor, x_TE: torch.Tensor, state_ME: torch.Tensor, rows: ScanRows
    ) -> torch.Tensor:
        num_tokens = x_TE.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_ME)
        y_TE = torch.empty_like(x_TE)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            before_NE = state_ME.index_select(0, from_T[part])
            y_TE[part] = before_NE + (1 - gate_TE[part]) * (x_TE[part] - before_NE)
            state_ME.index_copy_(0, to_T[part], y_TE[part])
        return y_TE

    return gated_scan


def sample_rows(device: str) -> ScanRows:
    """Three rows of a step, of 1, 4 and 5 tokens, for states of five rows and padding's."""
    return ScanRows(
        row_R=torch.tensor([4, 0, 2], dtype=torch.int32, device=device),
        query_start_R1=torch.tensor([0, 1, 5, 10], dtype=torch.int32, device=device),
        decode=False,
    )


def long_sample_rows(device: str) -> tuple[ScanRows, int]:
    """Rows of 1, 130, 3 and 70 tokens, for states of five rows and padding's, and their tokens; one
    that is padding's among them."""
    rows = ScanRows(
        row_R=torch.tensor([4, 0, 5, 2, 1], dtype=torch.int32, device=device),
        query_start_R1=torch.tensor([0, 1, 131, 131, 134, 204], dtype=torch.int32, device=device),
        decode=False,
    )
    return rows, 204


def with_trail(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Calls that go another way, for a sample's check: the same step with drafts, and one that goes
    on from each state that it has left behind the rows' own."""
    *inputs, state, rows = arguments
    first, depth = state.shape[0], 4
    wide = torch.cat((state, torch.zeros_like(state[:1]).expand(3 * depth + 1, *state.shape[1:])))
    drafted = replace(rows, trail=StateTrail(first=first, depth=depth))
    left = [first + depth + j for j in range(3)] + [first + 2 * depth + j for j in range(4)]
    numbers = {"dtype": torch.int32, "device": state.device}
    after = ScanRows(
        row_R=torch.tensor(left, **numbers),
        query_start_R1=torch.arange(len(left) + 1, **numbers),
        decode=True,
    )
    return (*inputs, wide, drafted), (*(one[: len(left)] for one in inputs), wide, after)


def _sample(problem: GatedScanProblem) -> Sample:
    device, generator = problem.device, sample_generator()
    x_TE, gate_TE, state_ME = (
        random_tensor(count, 24, dtype=torch.float32, device=device, generator=generator)
        for count in (10, 10, 6)
    )
    arguments = gate_TE.sigmoid(), x_TE, state_ME, sample_rows(device)
    return Sample(problem=problem, weights=(), arguments=arguments, further=with_trail(arguments))


OP: Op[GatedScanProblem] = Op(
    name="gated_scan",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.gated_scan.native:KERNEL",
        "headrace.back.kernels.gated_scan.triton_gated_scan:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 1e-5,
)

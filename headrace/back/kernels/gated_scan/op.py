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
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator


@dataclass(frozen=True, kw_only=True)
class ScanRows:
    """row_R int32 or int64 [R]: the runner's row of each row of the step, M for padding;
    query_start_R1 int32 [R + 1]: its first token; padding has none. `decode`: token i is row i's
    only one, and behind the real rows padding's.

    Kernels leave row M of a state alone, and what they return of tokens without a row as it
    comes."""

    row_R: torch.Tensor
    query_start_R1: torch.Tensor
    decode: bool

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
        row_T = rows.row_of_token(num_tokens, state_ME.shape[0] - 1)
        y_TE = torch.empty_like(x_TE)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            before_NE = state_ME.index_select(0, row_T[part])
            y_TE[part] = before_NE + (1 - gate_TE[part]) * (x_TE[part] - before_NE)
            state_ME.index_copy_(0, row_T[part], y_TE[part])
        return y_TE

    return gated_scan


def sample_rows(device: str) -> ScanRows:
    """Three rows of a step, of 1, 4 and 5 tokens, for states of five rows and padding's."""
    return ScanRows(
        row_R=torch.tensor([4, 0, 2], dtype=torch.int32, device=device),
        query_start_R1=torch.tensor([0, 1, 5, 10], dtype=torch.int32, device=device),
        decode=False,
    )


def _sample(problem: GatedScanProblem) -> Sample:
    device, generator = problem.device, sample_generator()
    x_TE, gate_TE, state_ME = (
        random_tensor(count, 24, dtype=torch.float32, device=device, generator=generator)
        for count in (10, 10, 6)
    )
    arguments = gate_TE.sigmoid(), x_TE, state_ME, sample_rows(device)
    return Sample(problem=problem, weights=(), arguments=arguments)


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

"""Each token moved towards the one before it, several times, over the rows of a step (Peng et al.
2023, "RWKV", equation 11): `bind(problem, weight_NE)` returns `f(x_TE, state_ME, rows) -> y_TNE`.

y_n = x_t + (x_(t-1) - x_t) * weight_n: a weight of 0 gives the token, of 1 the one before it. What
lies before a row's first token is its state, which becomes the row's last x. x_TE in the model's
dtype, its rows may be a view; weight float32; state_ME [M + 1, E] in the dtype of x, row M for
padding; y in that dtype, each result y[:, n] contiguous.

T query tokens, E hidden size, N results, M rows of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_scan.op import ScanRows, sample_rows, with_trail
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

TokenShift = Callable[[torch.Tensor, torch.Tensor, ScanRows], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TokenShiftProblem:
    """`dtype` is that of x, y and the state. `count`: N."""

    device: str
    dtype: torch.dtype
    width: int
    count: int


def bind_reference(problem: TokenShiftProblem, weight_NE: torch.Tensor) -> TokenShift:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, weight_NE)

    def token_shift(x_TE: torch.Tensor, state_ME: torch.Tensor, rows: ScanRows) -> torch.Tensor:
        num_tokens = x_TE.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_ME)
        before_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            before_TE[part] = state_ME.index_select(0, from_T[part])
            state_ME.index_copy_(0, to_T[part], x_TE[part])
        wide_TE = x_TE.float()
        change_TE = before_TE.float() - wide_TE
        y_NTE = (wide_TE + change_TE * weight_NE[:, None]).to(x_TE.dtype)
        return y_NTE.transpose(0, 1)

    return token_shift


def check_weights(problem: TokenShiftProblem, weight_NE: torch.Tensor) -> None:
    """Asserts that the weights are those of the problem."""
    assert weight_NE.shape == (problem.count, problem.width), weight_NE.shape
    assert weight_NE.dtype == torch.float32, weight_NE.dtype


def _sample(problem: TokenShiftProblem) -> Sample:
    new = {"device": problem.device, "generator": sample_generator()}
    weight = random_tensor(problem.count, problem.width, dtype=torch.float32, **new)
    x = random_tensor(10, problem.width + 8, dtype=problem.dtype, **new)
    state = random_tensor(6, problem.width, dtype=problem.dtype, **new)
    arguments = (x[:, : problem.width], state, sample_rows(problem.device))
    sample = Sample(problem=problem, weights=(weight,), arguments=arguments)
    return replace(sample, further=with_trail(arguments))


OP: Op[TokenShiftProblem] = Op(
    name="token_shift",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.token_shift.native:KERNEL",
        "headrace.back.kernels.token_shift.triton_token_shift:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

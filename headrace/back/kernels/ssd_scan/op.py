"""Mamba 2's recurrence over the rows of a step (state space duality, Dao and Gu 2024, section 6):
`bind(problem, decay_H, bias_H, skip_H)` returns `f(x_THP, dt_TH, b_TGN, c_TGN, state_MHPN, rows) ->
y_THP`.

Per token and head, with dt = clamp(softplus(dt + bias), *limits):

    S = exp(dt * decay) * S + dt * x b^T;  y = S c + skip * x

where S begins as the row's state, which becomes the row's last S. Head h reads group h // (H / G)
of b and c. x, dt, b, c in the model's dtype, their rows may be views into merged projections;
decay_H (negative: -exp(A_log)), bias_H and skip_H float32; state_MHPN float32 [M + 1, H, P, N], row
M for padding.

T query tokens, H heads of P channels, G groups, N state size, M rows of the runner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.gated_scan.op import (
    ScanRows,
    long_sample_rows,
    sample_rows,
    with_trail,
)
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

SsdScan = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class SsdScanProblem:
    """`dtype` is that of the inputs and of y; `limits`: of dt."""

    device: str
    dtype: torch.dtype
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    limits: tuple[float, float] = (0.0, math.inf)


def bind_reference(
    problem: SsdScanProblem, decay_H: torch.Tensor, bias_H: torch.Tensor, skip_H: torch.Tensor
) -> SsdScan:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, decay_H, bias_H, skip_H)
    per_group = problem.heads // problem.groups

    def ssd_scan(
        x_THP: torch.Tensor,
        dt_TH: torch.Tensor,
        b_TGN: torch.Tensor,
        c_TGN: torch.Tensor,
        state_MHPN: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        num_tokens = x_THP.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_MHPN)
        step_TH = F.softplus(dt_TH.float() + bias_H).clamp(*problem.limits)
        keep_TH = torch.exp(step_TH * decay_H)
        b_THN, c_THN = (part.float().repeat_interleave(per_group, dim=1) for part in (b_TGN, c_TGN))
        y_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            x_NHP = x_THP[part].float()
            in_NHPN = (x_NHP * step_TH[part, :, None])[..., None] * b_THN[part, :, None]
            s_NHPN = state_MHPN.index_select(0, from_T[part]) * keep_TH[part, :, None, None]
            s_NHPN = s_NHPN + in_NHPN
            y_NHP = torch.einsum("thpn,thn->thp", s_NHPN, c_THN[part]) + skip_H[:, None] * x_NHP
            y_THP[part] = y_NHP.to(y_THP.dtype)
            state_MHPN.index_copy_(0, to_T[part], s_NHPN)
        return y_THP

    return ssd_scan


def check_weights(problem: SsdScanProblem, *weights: torch.Tensor) -> None:
    """Asserts that the weights are those of the problem."""
    assert problem.heads % problem.groups == 0, problem
    for weight_H in weights:
        assert weight_H.dtype == torch.float32 and weight_H.shape == (problem.heads,), weight_H


def _sample(problem: SsdScanProblem) -> Sample:
    sample = _sample_of(problem, sample_rows(problem.device), 10)
    return replace(sample, further=with_trail(sample.arguments))


def long_sample(problem: SsdScanProblem) -> Sample:
    """A prompt among short rows, and heads that keep from almost all to almost nothing."""
    sample = _sample_of(problem, *long_sample_rows(problem.device))
    _, bias_H, skip_H = sample.weights
    decay_H = -torch.logspace(-3, 1, problem.heads, device=problem.device)
    return replace(sample, weights=(decay_H, bias_H, skip_H))


def _sample_of(problem: SsdScanProblem, rows: ScanRows, tokens: int) -> Sample:
    device, generator = problem.device, sample_generator()
    new = {"dtype": problem.dtype, "device": device, "generator": generator}
    wide = {**new, "dtype": torch.float32}
    sizes = [problem.heads * problem.head_dim, *[problem.groups * problem.state_dim] * 2]
    x, b, c = random_tensor(tokens, sum(sizes), **new).split(sizes, dim=1)
    decay, bias, skip = (random_tensor(problem.heads, **wide) for _ in range(3))
    shape = (6, problem.heads, problem.head_dim, problem.state_dim)
    arguments = (
        x.unflatten(1, (problem.heads, -1)),
        random_tensor(tokens, problem.heads, **new),
        b.unflatten(1, (problem.groups, -1)),
        c.unflatten(1, (problem.groups, -1)),
        random_tensor(*shape, **wide),
        rows,
    )
    return Sample(problem=problem, weights=(-decay.exp(), bias, skip), arguments=arguments)


OP: Op[SsdScanProblem] = Op(
    name="ssd_scan",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.ssd_scan.native:KERNEL",
        "headrace.back.kernels.ssd_scan.triton_chunks:KERNEL",
        "headrace.back.kernels.ssd_scan.triton_ssd_scan:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

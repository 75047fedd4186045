"""Mamba's selective scan over the rows of a step (Gu and Dao 2023, algorithm 2): `bind(problem,
decay_IN, bias_I, skip_I)` returns `f(x_TI, dt_TI, b_TN, c_TN, gate_TI, state_MIN, rows) -> y_TI`.

Per token and channel, with dt = softplus(dt + bias):

    S = exp(dt * decay) * S + dt * x * b;  y = (S c + skip * x) * silu(gate)

where S [N] begins as the row's state, which becomes the row's last S. b and c are those of all
channels. x, dt, b, c, gate in the model's dtype, their rows may be views into merged projections;
decay_IN (negative: -exp(A_log)), bias_I and skip_I float32; state_MIN float32 [M + 1, I, N], row M
for padding.

T query tokens, I channels, N state size, M rows of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.gated_scan.op import ScanRows, sample_rows, with_trail
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

SelectiveScan = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class SelectiveScanProblem:
    """`dtype` is that of the inputs and of y."""

    device: str
    dtype: torch.dtype
    channels: int
    state_dim: int


def bind_reference(
    problem: SelectiveScanProblem,
    decay_IN: torch.Tensor,
    bias_I: torch.Tensor,
    skip_I: torch.Tensor,
) -> SelectiveScan:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, decay_IN, bias_I, skip_I)

    def selective_scan(
        x_TI: torch.Tensor,
        dt_TI: torch.Tensor,
        b_TN: torch.Tensor,
        c_TN: torch.Tensor,
        gate_TI: torch.Tensor,
        state_MIN: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        num_tokens = x_TI.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_MIN)
        step_TI = F.softplus(dt_TI.float() + bias_I)
        in_TI = x_TI.float() * step_TI
        y_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype, device=x_TI.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            keep_PIN = torch.exp(step_TI[part, :, None] * decay_IN)
            s_PIN = state_MIN.index_select(0, from_T[part]) * keep_PIN
            s_PIN = s_PIN + in_TI[part, :, None] * b_TN[part, None].float()
            y_PI = (s_PIN * c_TN[part, None].float()).sum(-1) + skip_I * x_TI[part].float()
            y_TI[part] = (y_PI * F.silu(gate_TI[part].float())).to(y_TI.dtype)
            state_MIN.index_copy_(0, to_T[part], s_PIN)
        return y_TI

    return selective_scan


def check_weights(
    problem: SelectiveScanProblem,
    decay_IN: torch.Tensor,
    bias_I: torch.Tensor,
    skip_I: torch.Tensor,
) -> None:
    """Asserts that the weights are those of the problem."""
    assert decay_IN.shape == (problem.channels, problem.state_dim), decay_IN.shape
    assert bias_I.shape == skip_I.shape == (problem.channels,), (bias_I.shape, skip_I.shape)
    assert decay_IN.dtype == bias_I.dtype == skip_I.dtype == torch.float32, decay_IN.dtype


def _sample(problem: SelectiveScanProblem) -> Sample:
    device, generator = problem.device, sample_generator()
    channels, state_dim = problem.channels, problem.state_dim
    new = {"dtype": problem.dtype, "device": device, "generator": generator}
    wide = {**new, "dtype": torch.float32}
    x, gate = random_tensor(10, 2 * channels, **new).chunk(2, dim=1)
    b, c = random_tensor(10, 2 * state_dim, **new).chunk(2, dim=1)
    decay = random_tensor(channels, state_dim, **wide)
    bias, skip = (random_tensor(channels, **wide) for _ in range(2))
    state = random_tensor(6, channels, state_dim, **wide)
    arguments = (x, random_tensor(10, channels, **new), b, c, gate, state, sample_rows(device))
    return Sample(
        problem=problem,
        weights=(-decay.exp(), bias, skip),
        arguments=arguments,
        further=with_trail(arguments),
    )


OP: Op[SelectiveScanProblem] = Op(
    name="selective_scan",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.selective_scan.native:KERNEL",
        "headrace.back.kernels.selective_scan.triton_selective_scan:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

"""A short causal convolution of each channel over the rows of a step (Mamba, Gu and Dao 2023,
section 3.4): `bind(problem, weight_WC, bias_C)` returns `f(x_TC, state_MWC, rows) -> y_TC`.

y_t = act(b + sum_j w_j * x_(t - W + 1 + j)) with W taps; what lies before a row's first token is in
its state, which becomes the row's last W - 1 inputs. x_TC in the model's dtype, its rows may be a
view into a merged projection; weight and bias (or None) float32; state_MWC [M + 1, W - 1, C] in the
dtype of x, row M for padding. `activation`: "silu" or "".

T query tokens, C channels, M rows of the runner.
"""

from __future__ import annotations

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

CausalConv = Callable[[torch.Tensor, torch.Tensor, ScanRows], torch.Tensor]
ACTIVATIONS = ("", "silu")


@dataclass(frozen=True, kw_only=True)
class CausalConvProblem:
    """`dtype` is that of x, y and the state."""

    device: str
    dtype: torch.dtype
    channels: int
    taps: int
    activation: str = "silu"
    bias: bool = False


def bind_reference(
    problem: CausalConvProblem, weight_WC: torch.Tensor, bias_C: torch.Tensor | None
) -> CausalConv:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, weight_WC, bias_C)

    def causal_conv(x_TC: torch.Tensor, state_MWC: torch.Tensor, rows: ScanRows) -> torch.Tensor:
        num_tokens = x_TC.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_MWC)
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            before_NWC = state_MWC.index_select(0, from_T[part])
            taps_NWC = torch.cat((before_NWC, x_TC[part, None]), dim=1)
            y_NC = (taps_NWC.float() * weight_WC).sum(1)
            y_NC = y_NC if bias_C is None else y_NC + bias_C
            y_TC[part] = (F.silu(y_NC) if problem.activation else y_NC).to(x_TC.dtype)
            state_MWC.index_copy_(0, to_T[part], taps_NWC[:, 1:])
        return y_TC

    return causal_conv


def check_weights(
    problem: CausalConvProblem, weight_WC: torch.Tensor, bias_C: torch.Tensor | None
) -> None:
    """Asserts that the weights are those of the problem."""
    assert weight_WC.shape == (problem.taps, problem.channels), weight_WC.shape
    assert weight_WC.dtype == torch.float32 and problem.bias == (bias_C is not None), problem
    assert problem.activation in ACTIVATIONS, problem.activation


def _sample(problem: CausalConvProblem) -> Sample:
    sample = _sample_of(problem, sample_rows(problem.device), 10)
    return replace(sample, further=with_trail(sample.arguments))


def long_sample(problem: CausalConvProblem) -> Sample:
    """A prompt among short rows."""
    return _sample_of(problem, *long_sample_rows(problem.device))


def _sample_of(problem: CausalConvProblem, rows: ScanRows, tokens: int) -> Sample:
    device, generator = problem.device, sample_generator()
    new = {"device": device, "generator": generator}
    weight, bias = (
        random_tensor(count, problem.channels, dtype=torch.float32, **new)
        for count in (problem.taps, 1)
    )
    x = random_tensor(tokens, problem.channels + 8, dtype=problem.dtype, **new)
    shape = (6, problem.taps - 1, problem.channels)
    state = random_tensor(*shape, dtype=problem.dtype, **new)
    return Sample(
        problem=problem,
        weights=(weight, bias[0] if problem.bias else None),
        arguments=(x[:, : problem.channels], state, rows),
    )


OP: Op[CausalConvProblem] = Op(
    name="causal_conv",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.causal_conv.native:KERNEL",
        "headrace.back.kernels.causal_conv.triton_tiles:KERNEL",
        "headrace.back.kernels.causal_conv.triton_causal_conv:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

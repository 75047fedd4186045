"""RWKV 4's weighted average over the rows of a step (Peng et al. 2023, "RWKV", equations 16 and 19
to 27): `bind(problem, decay_C, first_C)` returns `f(k_TC, v_TC, state_M3C, rows) -> y_TC`.

Per row and channel, y_t is the mean of v_1 .. v_t with weights exp(k_i - (t - 1 - i) * decay) for i
< t and exp(k_t + first) for t itself. The state holds the sum of weighted values, the sum of
weights, both divided by exp(m), and m, the greatest exponent in them; zeros: nothing came before. k
and v in the model's dtype, their rows may be views; decay_C (positive) and first_C float32; state
float32 [M + 1, 3, C], row M for padding; y in the model's dtype.

T query tokens, C channels, M rows of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

Wkv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ScanRows], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class WkvProblem:
    """`dtype` is that of the inputs and of y."""

    device: str
    dtype: torch.dtype
    channels: int


def bind_reference(problem: WkvProblem, decay_C: torch.Tensor, first_C: torch.Tensor) -> Wkv:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, decay_C, first_C)

    def wkv(
        k_TC: torch.Tensor, v_TC: torch.Tensor, state_M3C: torch.Tensor, rows: ScanRows
    ) -> torch.Tensor:
        num_tokens = k_TC.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_M3C)
        y_TC = torch.empty(k_TC.shape, dtype=k_TC.dtype, device=k_TC.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            k_NC, v_NC = k_TC[part].float(), v_TC[part].float()
            top_NC, below_NC, most_NC = state_M3C.index_select(0, from_T[part]).unbind(1)
            most_NC = most_NC.masked_fill(below_NC == 0, -torch.inf)
            y_top_NC, y_below_NC, _ = _add(top_NC, below_NC, most_NC, k_NC + first_C, v_NC)
            y_TC[part] = (y_top_NC / y_below_NC).to(y_TC.dtype)
            after = _add(top_NC, below_NC, most_NC - decay_C, k_NC, v_NC)
            state_M3C.index_copy_(0, to_T[part], torch.stack(after, dim=1))
        return y_TC

    return wkv


def _add(
    top: torch.Tensor, below: torch.Tensor, most: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both sums with one value of weight exp(k) more, and the greatest exponent."""
    greatest = torch.maximum(most, k)
    kept, taken = torch.exp(most - greatest), torch.exp(k - greatest)
    return top * kept + v * taken, below * kept + taken, greatest


def check_weights(problem: WkvProblem, decay_C: torch.Tensor, first_C: torch.Tensor) -> None:
    """Asserts that the weights are those of the problem."""
    assert decay_C.shape == first_C.shape == (problem.channels,), (decay_C.shape, first_C.shape)
    assert decay_C.dtype == first_C.dtype == torch.float32, decay_C.dtype


def _sample(problem: WkvProblem) -> Sample:
    device, generator = problem.device, sample_generator()
    wide = {"dtype": torch.float32, "device": device, "generator": generator}
    new = {**wide, "dtype": problem.dtype}
    decay, first = (random_tensor(problem.channels, **wide) for _ in range(2))
    k, v = random_tensor(10, 2 * problem.channels, **new).chunk(2, dim=1)
    state = random_tensor(6, 3, problem.channels, **wide)
    state[:, 1] = state[:, 1].exp()  # a sum of weights, which for one row are none
    state[3] = 0
    arguments = k, v, state, sample_rows(device)
    return Sample(
        problem=problem,
        weights=(decay.exp(), first),
        arguments=arguments,
        further=with_trail(arguments),
    )


OP: Op[WkvProblem] = Op(
    name="wkv",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.wkv.native:KERNEL",
        "headrace.back.kernels.wkv.triton_wkv:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

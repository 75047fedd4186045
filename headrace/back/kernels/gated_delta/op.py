"""The gated delta rule over the rows of a step (gated delta networks, Yang et al. 2024, equation
10): `bind(problem, decay_H, bias)` returns `f(q_TGK, k_TGK, v_THV, a, b_TH, state_MHKV, rows) ->
y_THV`.

Per token and head, with q and k of length 1 (times 1 / sqrt(K) for q), keep = exp(decay *
softplus(a + bias)) and beta = beta_scale * sigmoid(b):

    S = keep * S;  S = S + k (beta * (v - S^T k))^T;  y = S^T q

where S begins as the row's state, which becomes the row's last S. Value head h reads key head h //
(H / G). `per_channel`: each row of S is kept by a number of its own (Kimi delta attention, Kimi
Team 2025, equation 1): a is [T, H, K] and bias [H, K], else [T, H] and [H]. With a `bound`, below
0, keep = exp(bound * sigmoid(-decay * (a + bias))). q, k, v, a, b in the model's dtype, their rows
may be views into merged projections; decay_H (negative: -exp(A_log)) and bias float32; state_MHKV
float32 [M + 1, H, K, V], row M for padding.

T query tokens, G key heads, H value heads, M rows of the runner.
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

GatedDelta = Callable[..., torch.Tensor]
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDeltaProblem:
    """`dtype` is that of the inputs and of y. A `beta_scale` of 2 lets S turn around, not only
    fade. `bound`: 0 is none."""

    device: str
    dtype: torch.dtype
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: bool = False
    bound: float = 0.0
    beta_scale: float = 1.0

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """That of the bias, and of a token's a."""
        return (self.heads, self.key_dim) if self.per_channel else (self.heads,)


def bind_reference(
    problem: GatedDeltaProblem, decay_H: torch.Tensor, bias: torch.Tensor
) -> GatedDelta:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, decay_H, bias)
    per_key = problem.heads // problem.key_heads

    def heads_of(x_TGK: torch.Tensor) -> torch.Tensor:
        wide = x_TGK.float()
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
        return wide.repeat_interleave(per_key, dim=1)

    def kept(a: torch.Tensor) -> torch.Tensor:
        """[T, H, K], or [T, H, 1] where a head has one number."""
        x_THK = (a.float() + bias).view(a.shape[0], problem.heads, -1)
        if problem.bound:
            return torch.exp(problem.bound * torch.sigmoid(-decay_H[:, None] * x_THK))
        return torch.exp(decay_H[:, None] * F.softplus(x_THK))

    def gated_delta(
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_THV: torch.Tensor,
        a: torch.Tensor,
        b_TH: torch.Tensor,
        state_MHKV: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        num_tokens = v_THV.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_MHKV)
        q_THK, k_THK = heads_of(q_TGK) * problem.key_dim**-0.5, heads_of(k_TGK)
        keep_THK, beta_TH = kept(a), problem.beta_scale * b_TH.float().sigmoid()
        y_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            s_NHKV = state_MHKV.index_select(0, from_T[part]) * keep_THK[part, :, :, None]
            known_NHV = torch.einsum("nhkv,nhk->nhv", s_NHKV, k_THK[part])
            delta_NHV = (v_THV[part].float() - known_NHV) * beta_TH[part, :, None]
            s_NHKV = s_NHKV + k_THK[part, :, :, None] * delta_NHV[:, :, None]
            y_THV[part] = torch.einsum("nhkv,nhk->nhv", s_NHKV, q_THK[part]).to(y_THV.dtype)
            state_MHKV.index_copy_(0, to_T[part], s_NHKV)
        return y_THV

    return gated_delta


def check_weights(problem: GatedDeltaProblem, decay_H: torch.Tensor, bias: torch.Tensor) -> None:
    """Asserts that the weights are those of the problem."""
    assert problem.heads % problem.key_heads == 0 and problem.bound <= 0, problem
    assert decay_H.dtype == bias.dtype == torch.float32, (decay_H.dtype, bias.dtype)
    assert decay_H.shape == (problem.heads,), decay_H.shape
    assert bias.shape == problem.bias_shape, bias.shape


def _sample(problem: GatedDeltaProblem) -> Sample:
    rows = sample_rows(problem.device)
    sample = _sample_of(problem, rows, 10)
    return replace(sample, further=with_trail(sample.arguments))


def long_sample(problem: GatedDeltaProblem) -> Sample:
    """A prompt among short rows, and heads that keep from almost all to almost nothing."""
    sample = _sample_of(problem, *long_sample_rows(problem.device))
    decay_H, bias = sample.weights
    decay_H = -torch.logspace(-3, 1, problem.heads, device=problem.device)
    return replace(sample, weights=(decay_H, bias))


def _sample_of(problem: GatedDeltaProblem, rows: ScanRows, tokens: int) -> Sample:
    device, generator = problem.device, sample_generator()
    new = {"dtype": problem.dtype, "device": device, "generator": generator}
    keys = problem.key_heads * problem.key_dim
    qkv = random_tensor(tokens, 2 * keys + problem.heads * problem.value_dim, **new)
    q, k, v = qkv.split([keys, keys, problem.heads * problem.value_dim], dim=1)
    gates = math.prod(problem.bias_shape)
    ab = random_tensor(tokens, gates + problem.heads, **new)
    shape = (6, problem.heads, problem.key_dim, problem.value_dim)
    wide = {**new, "dtype": torch.float32}
    decay, bias = random_tensor(problem.heads, **wide), random_tensor(gates, **wide)
    arguments = (
        q.unflatten(1, (problem.key_heads, -1)),
        k.unflatten(1, (problem.key_heads, -1)),
        v.unflatten(1, (problem.heads, -1)),
        ab[:, :gates].unflatten(1, problem.bias_shape),
        ab[:, gates:],
        random_tensor(*shape, **wide),
        rows,
    )
    weights = -decay.exp(), bias.view(problem.bias_shape)
    return Sample(problem=problem, weights=weights, arguments=arguments)


OP: Op[GatedDeltaProblem] = Op(
    name="gated_delta",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.gated_delta.native:KERNEL",
        "headrace.back.kernels.gated_delta.triton_chunks:KERNEL",
        "headrace.back.kernels.gated_delta.triton_gated_delta:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

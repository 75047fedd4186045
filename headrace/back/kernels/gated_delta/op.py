"""The gated delta rule over the rows of a step (gated delta networks, Yang et al. 2024, equation
10): `bind(problem, decay_H, bias_H)` returns `f(q_TGK, k_TGK, v_THV, a_TH, b_TH, state_MHKV, rows)
-> y_THV`.

Per token and head, with q and k of length 1 (times 1 / sqrt(K) for q), keep = exp(decay *
softplus(a + bias)) and beta = sigmoid(b):

    S = keep * S;  S = S + k (beta * (v - S^T k))^T;  y = S^T q

where S begins as the row's state, which becomes the row's last S. Value head h reads key head h //
(H / G). q, k, v, a, b in the model's dtype, their rows may be views into merged projections;
decay_H (negative: -exp(A_log)) and bias_H float32; state_MHKV float32 [M + 1, H, K, V], row M for
padding.

T query tokens, G key heads, H value heads, M rows of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.gated_scan.op import ScanRows, sample_rows
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
    """`dtype` is that of the inputs and of y."""

    device: str
    dtype: torch.dtype
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


def bind_reference(
    problem: GatedDeltaProblem, decay_H: torch.Tensor, bias_H: torch.Tensor
) -> GatedDelta:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, decay_H, bias_H)
    per_key = problem.heads // problem.key_heads

    def heads_of(x_TGK: torch.Tensor) -> torch.Tensor:
        wide = x_TGK.float()
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
        return wide.repeat_interleave(per_key, dim=1)

    def gated_delta(
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_THV: torch.Tensor,
        a_TH: torch.Tensor,
        b_TH: torch.Tensor,
        state_MHKV: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        num_tokens = v_THV.shape[0]
        row_T = rows.row_of_token(num_tokens, state_MHKV.shape[0] - 1)
        q_THK, k_THK = heads_of(q_TGK) * problem.key_dim**-0.5, heads_of(k_TGK)
        keep_TH = torch.exp(decay_H * F.softplus(a_TH.float() + bias_H))
        beta_TH = b_TH.float().sigmoid()
        y_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            s_NHKV = state_MHKV.index_select(0, row_T[part]) * keep_TH[part, :, None, None]
            known_NHV = torch.einsum("nhkv,nhk->nhv", s_NHKV, k_THK[part])
            delta_NHV = (v_THV[part].float() - known_NHV) * beta_TH[part, :, None]
            s_NHKV = s_NHKV + k_THK[part, :, :, None] * delta_NHV[:, :, None]
            y_THV[part] = torch.einsum("nhkv,nhk->nhv", s_NHKV, q_THK[part]).to(y_THV.dtype)
            state_MHKV.index_copy_(0, row_T[part], s_NHKV)
        return y_THV

    return gated_delta


def check_weights(problem: GatedDeltaProblem, decay_H: torch.Tensor, bias_H: torch.Tensor) -> None:
    """Asserts that the weights are those of the problem."""
    assert problem.heads % problem.key_heads == 0, problem
    for weight_H in (decay_H, bias_H):
        assert weight_H.dtype == torch.float32 and weight_H.shape == (problem.heads,), weight_H


def _sample(problem: GatedDeltaProblem) -> Sample:
    device, generator = problem.device, sample_generator()
    new = {"dtype": problem.dtype, "device": device, "generator": generator}
    keys = problem.key_heads * problem.key_dim
    qkv = random_tensor(10, 2 * keys + problem.heads * problem.value_dim, **new)
    q, k, v = qkv.split([keys, keys, problem.heads * problem.value_dim], dim=1)
    ab = random_tensor(10, 2 * problem.heads, **new)
    shape = (6, problem.heads, problem.key_dim, problem.value_dim)
    wide = {**new, "dtype": torch.float32}
    decay, bias = (random_tensor(problem.heads, **wide) for _ in range(2))
    return Sample(
        problem=problem,
        weights=(-decay.exp(), bias),
        arguments=(
            q.unflatten(1, (problem.key_heads, -1)),
            k.unflatten(1, (problem.key_heads, -1)),
            v.unflatten(1, (problem.heads, -1)),
            ab[:, : problem.heads],
            ab[:, problem.heads :],
            random_tensor(*shape, **wide),
            sample_rows(device),
        ),
    )


OP: Op[GatedDeltaProblem] = Op(
    name="gated_delta",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.gated_delta.native:KERNEL",
        "headrace.back.kernels.gated_delta.triton_gated_delta:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

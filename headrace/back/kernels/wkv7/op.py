"""RWKV 7's recurrence over the rows of a step, a delta rule whose state changes by two vectors
(Peng et al. 2025, "RWKV-7 Goose", equations 9 to 21), with the norm of each head and the bonus of
the token itself: `bind(problem, removal_C, scale_C, bonus_C, weight_C, bias_C)` returns `f(r_TC,
w_TC, k_TC, v_TC, a_TC, [first_TC, mix_TC], state_MHKV, rows) -> y_TC`.

Per token and head, with u = k * removal, divided by its length, and rate = sigmoid(a):

    keep = exp(-exp(-1/2) * sigmoid(w))
    v = v + (first - v) * sigmoid(mix)         `mixes`: towards the value of the first layer
    k = k * (1 + (rate - 1) * scale)
    S = keep * S - (u * rate) (S^T u)^T + k v^T;  o = S^T r
    y = norm(o) * weight + bias + (r . (bonus * k)) v

where S begins as the row's state, which becomes the row's last S; the norm takes mean and variance
of a head, over V. Without a weight (None, and its bias) there is no norm. All of r, w, k, v, a,
first and mix are [T, H * D] in the model's dtype, their rows may be views; weights float32 [H * D];
state_MHKV float32 [M + 1, H, D, D], row M for padding.

T query tokens, H heads of D, C = H * D, M rows of the runner.
"""

from __future__ import annotations

import math
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

Wkv7 = Callable[..., torch.Tensor]
FASTEST = -math.exp(-0.5)
"""The logarithm of the least that a token keeps of the state."""
LEAST_LENGTH = 1e-12


@dataclass(frozen=True, kw_only=True)
class Wkv7Problem:
    """`dtype` is that of the inputs and of y. `mixes`: values are mixed with those of the first
    layer. `normed`: each head has a norm, with `eps`."""

    device: str
    dtype: torch.dtype
    heads: int
    head_dim: int
    mixes: bool = True
    normed: bool = True
    eps: float = 64e-5

    @property
    def channels(self) -> int:
        """C."""
        return self.heads * self.head_dim


Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""removal, scale, bonus, weight and bias."""


def bind_reference(problem: Wkv7Problem, *weights: torch.Tensor | None) -> Wkv7:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, *weights)
    by_head = (problem.heads, problem.head_dim)
    removal, scale, bonus, weight, bias = (
        None if one is None else one.view(by_head) for one in weights
    )
    assert removal is not None and scale is not None and bonus is not None

    def wkv7(*arguments: torch.Tensor | ScanRows) -> torch.Tensor:
        *inputs, state_MHKV, rows = arguments
        assert isinstance(rows, ScanRows) and isinstance(state_MHKV, torch.Tensor)
        wide = [
            one.float().unflatten(1, by_head) for one in inputs if not isinstance(one, ScanRows)
        ]
        r, w, k, v, a = wide[:5]
        if problem.mixes:
            v = v + (wide[5] - v) * wide[6].sigmoid()
        rate, keep = a.sigmoid(), torch.exp(FASTEST * w.sigmoid())
        u = k * removal
        u = u / u.norm(dim=-1, keepdim=True).clamp_min(LEAST_LENGTH)
        k = k * (1 + (rate - 1) * scale)
        num_tokens = r.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_MHKV)
        o_THV = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            s_NHKV = state_MHKV.index_select(0, from_T[part])
            found_NHV = torch.einsum("nhkv,nhk->nhv", s_NHKV, u[part])
            removed = (u[part] * rate[part])[..., None] * found_NHV[:, :, None]
            added = k[part][..., None] * v[part][:, :, None]
            s_NHKV = s_NHKV * keep[part][..., None] - removed + added
            o_THV[part] = torch.einsum("nhkv,nhk->nhv", s_NHKV, r[part])
            state_MHKV.index_copy_(0, to_T[part], s_NHKV)
        if weight is not None and bias is not None:
            o_THV = head_norm(o_THV, weight, bias, problem.eps)
        y_THV = o_THV + (r * k * bonus).sum(-1, keepdim=True) * v
        return y_THV.flatten(1).to(problem.dtype)

    return wkv7


def head_norm(
    o_THV: torch.Tensor, weight_HV: torch.Tensor, bias_HV: torch.Tensor, eps: float
) -> torch.Tensor:
    """The layer norm of each head, with its weight and bias."""
    centred = o_THV - o_THV.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return normed * weight_HV + bias_HV


def check_weights(problem: Wkv7Problem, *weights: torch.Tensor | None) -> None:
    """Asserts that the weights are those of the problem."""
    assert len(weights) == 5, len(weights)
    for place, weight in enumerate(weights):
        assert (weight is not None) == (place < 3 or problem.normed), (problem, place)
        if weight is not None:
            assert weight.shape == (problem.channels,) and weight.dtype == torch.float32, place


def _sample(problem: Wkv7Problem) -> Sample:
    device, generator = problem.device, sample_generator()
    new = {"dtype": problem.dtype, "device": device, "generator": generator}
    wide = {**new, "dtype": torch.float32}
    weights = [random_tensor(problem.channels, **wide) for _ in range(5)]
    count = 7 if problem.mixes else 5
    inputs = random_tensor(10, count * problem.channels, **new).chunk(count, dim=1)
    state = random_tensor(6, problem.heads, problem.head_dim, problem.head_dim, **wide)
    arguments = (*inputs, state, sample_rows(device))
    sample = Sample(
        problem=problem,
        weights=(*weights[:3], *(weights[3:] if problem.normed else (None, None))),
        arguments=arguments,
    )
    return replace(sample, further=with_trail(arguments))


OP: Op[Wkv7Problem] = Op(
    name="wkv7",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.wkv7.native:KERNEL",
        "headrace.back.kernels.wkv7.triton_wkv7:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

"""RWKV 6's recurrence over the rows of a step, with the norm of each head (Peng et al. 2024, "Eagle
and Finch", equations 17 to 20): `bind(problem, first_C, weight_C, bias_C)` returns `f(r_TC, w_TC,
k_TG, v_TG, state_MHKV, rows) -> y_TC`.

Per token and head, with keep = exp(-exp(w)):

    o = S^T r + (r . (first * k)) v;  S = keep * S + k v^T;  y = norm(o) * weight + bias

where S begins as the row's state, which becomes the row's last S; the norm takes mean and variance
of a head. Without `first` (None) it is gated linear attention (Yang et al. 2023, equation 3), as
QRWKV 6 has it: k is multiplied by 1 - keep, and o = S^T r / sqrt(D) of the new S. Without a weight
(None, and its bias) there is no norm. Head h reads key head h // (H / K). r and w are [T, H * D], k
and v [T, K * D], in the model's dtype, their rows may be views; weights float32 [H * D]; state_MHKV
float32 [M + 1, H, D, D], row M for padding.

T query tokens, H heads of D, K key heads, C = H * D, G = K * D, M rows of the runner.
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
from headrace.back.kernels.wkv7.op import head_norm

Wkv6 = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ScanRows], torch.Tensor
]


@dataclass(frozen=True, kw_only=True)
class Wkv6Problem:
    """`dtype` is that of the inputs and of y. `first`: a token's own key counts for itself by a
    weight. `normed`: each head has a norm, with `eps`."""

    device: str
    dtype: torch.dtype
    heads: int
    key_heads: int
    head_dim: int
    first: bool = True
    normed: bool = True
    eps: float = 64e-5

    @property
    def channels(self) -> int:
        """C."""
        return self.heads * self.head_dim


def bind_reference(
    problem: Wkv6Problem,
    first_C: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    bias_C: torch.Tensor | None,
) -> Wkv6:
    """The reference, a token at a time; safe in graphs."""
    check_weights(problem, first_C, weight_C, bias_C)
    per_key = problem.heads // problem.key_heads
    first, weight, bias = (
        None if one is None else one.view(problem.heads, problem.head_dim)
        for one in (first_C, weight_C, bias_C)
    )

    def wkv6(
        r_TC: torch.Tensor,
        w_TC: torch.Tensor,
        k_TG: torch.Tensor,
        v_TG: torch.Tensor,
        state_MHKV: torch.Tensor,
        rows: ScanRows,
    ) -> torch.Tensor:
        r, w, k, v = (
            one.float().unflatten(1, (-1, problem.head_dim)) for one in (r_TC, w_TC, k_TG, v_TG)
        )
        k, v = (one.repeat_interleave(per_key, dim=1) for one in (k, v))
        keep = torch.exp(-torch.exp(w))
        if first is None:
            k, r = k * (1 - keep), r * problem.head_dim**-0.5
        num_tokens = r.shape[0]
        from_T, to_T = rows.states_of_tokens(num_tokens, state_MHKV)
        o_THV = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        size = num_tokens if rows.decode else 1
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            before = state_MHKV.index_select(0, from_T[part])
            after = before * keep[part][..., None] + k[part][..., None] * v[part][:, :, None]
            read = after if first is None else before
            o_THV[part] = torch.einsum("nhkv,nhk->nhv", read, r[part])
            state_MHKV.index_copy_(0, to_T[part], after)
        if first is not None:
            o_THV = o_THV + (r * first * k).sum(-1, keepdim=True) * v
        if weight is not None and bias is not None:
            o_THV = head_norm(o_THV, weight, bias, problem.eps)
        return o_THV.flatten(1).to(problem.dtype)

    return wkv6


def check_weights(
    problem: Wkv6Problem,
    first_C: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    bias_C: torch.Tensor | None,
) -> None:
    """Asserts that the weights are those of the problem."""
    assert problem.heads % problem.key_heads == 0, problem
    assert (first_C is not None) == problem.first, problem
    assert (weight_C is not None) == (bias_C is not None) == problem.normed, problem
    for weight in (first_C, weight_C, bias_C):
        if weight is not None:
            assert weight.shape == (problem.channels,) and weight.dtype == torch.float32, weight


def _sample(problem: Wkv6Problem) -> Sample:
    device, generator = problem.device, sample_generator()
    new = {"dtype": problem.dtype, "device": device, "generator": generator}
    wide = {**new, "dtype": torch.float32}
    first, weight, bias = (random_tensor(problem.channels, **wide) for _ in range(3))
    keys = problem.key_heads * problem.head_dim
    sizes = (problem.channels, problem.channels, keys, keys)
    inputs = random_tensor(10, sum(sizes), **new).split(sizes, dim=1)
    state = random_tensor(6, problem.heads, problem.head_dim, problem.head_dim, **wide)
    arguments = (*inputs, state, sample_rows(device))
    sample = Sample(
        problem=problem,
        weights=(
            first if problem.first else None,
            *((weight, bias) if problem.normed else (None, None)),
        ),
        arguments=arguments,
    )
    return replace(sample, further=with_trail(arguments))


OP: Op[Wkv6Problem] = Op(
    name="wkv6",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.wkv6.native:KERNEL",
        "headrace.back.kernels.wkv6.triton_wkv6:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

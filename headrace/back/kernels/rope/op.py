"""Rotary position embedding (Su et al. 2021), in place on queries and keys.

`bind(problem)` returns `f(q_THD, k_TKD, positions_T, table_PR) -> None`. T tokens, H query heads, K
KV heads, D head_dim, R = rotary_dim <= D, P positions. q and k may be strided views into a merged
projection; their last dimension is contiguous. `table_PR` is float32: columns [0, R/2) cosines,
[R/2, R) sines of a position, already scaled by the attention factor. `layout` "half" pairs
dimension i with i + R/2 (Llama checkpoints as transformers stores them); "pairs" pairs 2i with
2i+1. Dimensions from R on are left as they are (partial rotary).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class RopeProblem:
    """`dtype` is that of q and k."""

    device: str
    dtype: torch.dtype
    head_dim: int
    rotary_dim: int
    layout: str = "half"


def bind_reference(problem: RopeProblem) -> Rope:
    """The reference: rotates in float32 and casts back."""
    rotary = problem.rotary_dim
    rotate = {"half": _rotate_half, "pairs": _rotate_pairs}[problem.layout]

    def rope(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, table_PR: torch.Tensor
    ) -> None:
        cos_T1F, sin_T1F = table_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
        rotate(q_THD[..., :rotary], cos_T1F, sin_T1F)
        rotate(k_TKD[..., :rotary], cos_T1F, sin_T1F)

    return rope


def _rotate_half(x_THR: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    a, b = x_THR.float().chunk(2, dim=-1)
    x_THR.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def _rotate_pairs(x_THR: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    a, b = x_THR[..., 0::2].float(), x_THR[..., 1::2].float()
    x_THR.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2))


def _sample(problem: RopeProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    qkv = random_tensor(3, 7 * problem.head_dim, **new).view(3, 7, problem.head_dim)
    angles = 3 * torch.rand(11, problem.rotary_dim // 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(problem.device)
    positions = torch.tensor([10, 0, 4], device=problem.device)
    return Sample(
        problem=problem, weights=(), arguments=(qkv[:, :4], qkv[:, 4:6], positions, table)
    )


OP: Op[RopeProblem] = Op(
    name="rope",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.rope.native:KERNEL",
        "headrace.back.kernels.rope.triton_rope:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

"""What a step leaves in a cache of latents, and the rotated part of its queries, in one pass.

`bind(problem, weight_C)` returns `f(q_THD, latent_TW, positions_T, table_PR, kv, slot_T, q_THW) ->
None`. T tokens, H query heads of D = `nope` + R dimensions, C `rank`, R `rotary` (it may be 0), W =
C + R. Of latent_TW, as the down-projection leaves it, the first C elements are normed (RMSNorm,
float32 weight) and the last R rotated; the result goes into kv [num_blocks, block_tokens, W] at
slot_T (see kernels/kv_write). The last R dimensions of each query head are rotated into q_THW[...,
C:], behind what head_linear makes of its first ones. q and latent may be strided; last dimensions
are contiguous. The table and `layout` are those of kernels/rope. A `quantized` cache is int8
and lies as quantized.py says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.latent_write import quantized
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.rms_norm.op import RMSNormProblem, bind_norm
from headrace.back.kernels.rope.op import RopeProblem
from headrace.back.kernels.rope.op import bind_reference as bind_rope

LatentWrite = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
    ],
    None,
]


@dataclass(frozen=True, kw_only=True)
class LatentWriteProblem:
    """`dtype` is that of the queries, the latents and, unless it is `quantized`, the cache."""

    device: str
    dtype: torch.dtype
    heads: int
    nope: int
    rank: int
    rotary: int
    block_tokens: int
    eps: float
    layout: str = "half"
    quantized: str | None = None


def check_operands(
    problem: LatentWriteProblem,
    q_THD: torch.Tensor,
    latent_TW: torch.Tensor,
    kv: torch.Tensor,
    q_THW: torch.Tensor,
) -> None:
    """Asserts shapes and dtypes."""
    width = problem.rank + problem.rotary
    assert q_THD.shape[1:] == (problem.heads, problem.nope + problem.rotary), q_THD.shape
    assert latent_TW.shape == (q_THD.shape[0], width), latent_TW.shape
    assert q_THW.shape == (*q_THD.shape[:2], width) and q_THW.is_contiguous(), q_THW.shape
    stored = width
    if problem.quantized:
        values = quantized.value_bytes(width, problem.rank, problem.quantized)
        stored = values + quantized.SCALE_BYTES
    assert kv.shape[1:] == (problem.block_tokens, stored) and kv.stride(2) == 1, kv.shape
    assert kv.dtype == (torch.int8 if problem.quantized else problem.dtype), kv.dtype
    tensors = (q_THD, latent_TW, q_THW)
    assert all(t.dtype == problem.dtype and t.stride(-1) == 1 for t in tensors)


def bind_reference(problem: LatentWriteProblem, weight_C: torch.Tensor) -> LatentWrite:
    """The reference: by the references of norm and rotation."""
    rank, facts = problem.rank, {"device": problem.device, "dtype": problem.dtype}
    norm = bind_norm(RMSNormProblem(**facts, width=rank, eps=problem.eps), weight_C)
    rotate = bind_rope(
        RopeProblem(
            **facts, head_dim=problem.rotary, rotary_dim=problem.rotary, layout=problem.layout
        )
    )

    def latent_write(
        q_THD: torch.Tensor,
        latent_TW: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        kv: torch.Tensor,
        slot_T: torch.Tensor,
        q_THW: torch.Tensor,
    ) -> None:
        check_operands(problem, q_THD, latent_TW, kv, q_THW)
        rotated_THR, key_T1R = q_THW[..., rank:], latent_TW[:, None, rank:].clone()
        rotated_THR.copy_(q_THD[..., problem.nope :])
        if problem.rotary:
            rotate(rotated_THR, key_T1R, positions_T, table_PR)
        latent = torch.cat((norm(latent_TW[:, :rank]), key_T1R[:, 0]), dim=1)
        block_T = torch.div(slot_T, problem.block_tokens, rounding_mode="floor")
        place_T = slot_T - block_T * problem.block_tokens
        if problem.quantized is None:
            kv[block_T, place_T] = latent
            return
        parts = quantized.quantize(latent, rank, problem.quantized)
        for cache, part in zip(quantized.values_and_scales(kv), parts, strict=True):
            cache[block_T, place_T] = part

    return latent_write


def _sample(problem: LatentWriteProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    width, block = problem.rank + problem.rotary, problem.block_tokens
    q = random_tensor(3, problem.heads, problem.nope + problem.rotary, **new)
    latent = random_tensor(3, width + 8, **new)[:, :width]
    angles = 3 * torch.rand(11, problem.rotary // 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(problem.device)
    positions = torch.tensor([10, 0, 4], device=problem.device)
    slot = torch.tensor([block, 2 * block - 1, 3 * block - 1], device=problem.device)
    kv = quantized.random_cache((3, block, width), problem.rank, problem.quantized, **new)
    out = torch.zeros((3, problem.heads, width), dtype=problem.dtype, device=problem.device)
    weight = random_tensor(problem.rank, **{**new, "dtype": torch.float32})
    return Sample(
        problem=problem,
        weights=(weight,),
        arguments=(q, latent, positions, table, kv, slot, out),
    )


def _outputs(sample: Sample) -> list[torch.Tensor]:
    """The queries, and what the cache means: quantized of values that lie between two may differ by
    one."""
    problem, (*_, kv, _, q_THW) = sample.problem, sample.arguments
    return [q_THW, quantized.latents(kv, problem.rank, problem.quantized, torch.float32)]


def _tolerance(problem: LatentWriteProblem) -> float:
    step = {None: 0.0, "int8": 1 / 127, "fp8": 1 / 16}.get(problem.quantized, 1 / 3)
    return float_tolerance(problem.dtype) + step


OP: Op[LatentWriteProblem] = Op(
    name="latent_write",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.latent_write.native:KERNEL",
        "headrace.back.kernels.latent_write.triton_latent_write:KERNEL",
    ),
    sample=_sample,
    tolerance=_tolerance,
    outputs=_outputs,
)

"""Writes the step's keys and values into the paged KV cache.

`bind(problem, scales_2K | None)` returns `f(k_TKD, v_TKD, kv, slot_T) -> None`. kv [num_blocks, 2,
K, block_tokens, D] (0 = keys, 1 = values), T tokens, K KV heads, D head_dim. slot_T int64, never
negative: block * block_tokens + offset. k and v may be strided views; their last dimension is
contiguous. Slots of one step are distinct, except that padding may hit block 0 many times (the null
block, whose content means nothing). A quantized cache holds values of a byte or less and scales
(`quantized.py`); scales_2K (float32): those of keys and of values, for each KV head, if they are
`fixed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.kv_write.quantized import (
    quantize,
    random_quantized_cache,
    values_and_scales,
)
from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator


class FixedScales(Protocol):
    """A problem of a cache whose scales may be fixed."""

    @property
    def device(self) -> str: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def fixed(self) -> bool: ...


KVWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class KVWriteProblem:
    """`dtype` is that of k, v and, unless it is `quantized`, the cache. `fixed`: its scales are not
    those of tokens."""

    device: str
    dtype: torch.dtype
    kv_heads: int
    head_dim: int
    block_tokens: int
    quantized: str | None = None
    fixed: bool = False


def bind_reference(problem: KVWriteProblem, scales_2K: torch.Tensor | None = None) -> KVWrite:
    """The reference: one indexed write each for keys and values."""
    block_tokens = problem.block_tokens
    assert (scales_2K is not None) == problem.fixed, problem

    def kv_write(
        k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: torch.Tensor, slot_T: torch.Tensor
    ) -> None:
        block_T = torch.div(slot_T, block_tokens, rounding_mode="floor")
        offset_T = slot_T - block_T * block_tokens
        for half, x_TKD in enumerate((k_TKD, v_TKD)):
            if problem.quantized:
                quantized, scales = values_and_scales(kv)
                fixed_K = None if scales_2K is None else scales_2K[half]
                quantized_TKD, scales_TK = quantize(x_TKD, problem.quantized, fixed_K)
                quantized[block_T, half, :, offset_T] = quantized_TKD
                scales[block_T, half, :, offset_T] = scales_TK
            else:
                kv[block_T, half, :, offset_T] = x_TKD

    return kv_write


def _sample(problem: KVWriteProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    heads, head_dim, block_tokens = problem.kv_heads, problem.head_dim, problem.block_tokens
    both = random_tensor(3, 2 * heads, head_dim, **new)
    if problem.quantized:
        shape = (3, heads, block_tokens, head_dim)
        kv = random_quantized_cache(
            shape, generator=generator, device=problem.device, form=problem.quantized
        )
    else:
        kv = random_tensor(3, 2, heads, block_tokens, head_dim, **new)
    slot = torch.tensor(
        [block_tokens, 2 * block_tokens - 1, 3 * block_tokens - 1], device=problem.device
    )
    return Sample(
        problem=problem,
        weights=fixed_scales(problem, generator),
        arguments=(both[:, :heads], both[:, heads:], kv, slot),
    )


def fixed_scales(problem: FixedScales, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random scales [2, K], some so small that values are beyond their range; none if they are not
    fixed."""
    if not problem.fixed:
        return ()
    scales = torch.rand(2, problem.kv_heads, generator=generator, device=generator.device) / 128
    return ((scales + 1e-3).to(problem.device),)


OP: Op[KVWriteProblem] = Op(
    name="kv_write",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.kv_write.native:KERNEL",
        "headrace.back.kernels.kv_write.triton_kv_write:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 0.0,
)

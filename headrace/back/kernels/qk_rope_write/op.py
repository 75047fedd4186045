"""What lies between the merged query-key-value projection and attention, in one pass: norm of each
query and key head, rotary position embedding, and the write of the step's keys and values into the
paged cache.

`bind(problem, q_weight_D | None, k_weight_D | None)` returns `f(qkv_TC, positions_T, table_PR, kv,
slot_T) -> q_THD`. T tokens, H query heads, K KV heads, D head_dim, C = (H + 2 K) D columns:
queries, then keys, then values. The queries are normed and rotated in place in `qkv_TC`, and the
result is a view of them; the columns of keys and values stay as they are. The weights are float32
(Gemma's 1 already added), None where `eps` is None. Norm: kernels/rms_norm; rotation, `positions_T`
and `table_PR`: kernels/rope (not read if `rotary_dim` is 0); `kv` and `slot_T`: kernels/kv_write.

A kernel may keep float32 between the stages, where the separate ops cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.kv_write import op as kv_write
from headrace.back.kernels.kv_write.quantized import dequantize, random_quantized_cache
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.rms_norm import op as rms_norm
from headrace.back.kernels.rope import op as rope

QKRopeWrite = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


@dataclass(frozen=True, kw_only=True)
class QKRopeWriteProblem:
    """`dtype` is that of the projection and, unless it is `quantized` ("int8" or "fp8",
    kernels/kv_write/quantized.py), the cache.

    eps          of the norm over each head; None: queries and keys are not normed
    rotary_dim   dimensions rotated, from the first on; 0: none
    layout       which dimensions form a pair, as in kernels/rope
    fixed        the cache's scales are not those of tokens (kernels/kv_write)
    """

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    rotary_dim: int
    layout: str = "half"
    eps: float | None = None
    quantized: str | None = None
    fixed: bool = False


def bind_reference(
    problem: QKRopeWriteProblem,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    scales_2K: torch.Tensor | None = None,
) -> QKRopeWrite:
    """The reference: the references of the separate ops, one after the other."""
    write = kv_write.bind_reference(
        kv_write.KVWriteProblem(
            device=problem.device,
            dtype=problem.dtype,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            block_tokens=problem.block_tokens,
            quantized=problem.quantized,
            fixed=problem.fixed,
        ),
        scales_2K,
    )
    rotate = _rotation(problem)
    norm_q, norm_k = _norm(problem, q_weight_D), _norm(problem, k_weight_D)
    split = [problem.heads, problem.kv_heads, problem.kv_heads]

    def qk_rope_write(
        qkv_TC: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        kv: torch.Tensor,
        slot_T: torch.Tensor,
    ) -> torch.Tensor:
        heads = qkv_TC.view(qkv_TC.shape[0], -1, problem.head_dim)
        q_THD, k_TKD, v_TKD = heads.split_with_sizes(split, dim=1)
        if norm_q is not None:
            q_THD.copy_(norm_q(q_THD))
        k_TKD = k_TKD.clone() if norm_k is None else norm_k(k_TKD)
        if rotate is not None:
            rotate(q_THD, k_TKD, positions_T, table_PR)
        write(k_TKD, v_TKD, kv, slot_T)
        return q_THD

    return qk_rope_write


def _norm(problem: QKRopeWriteProblem, weight_D: torch.Tensor | None) -> rms_norm.Norm | None:
    if problem.eps is None:
        return None
    assert weight_D is not None, "a norm has a weight"
    width = rms_norm.RMSNormProblem(
        device=problem.device, dtype=problem.dtype, width=problem.head_dim, eps=problem.eps
    )
    return rms_norm.bind_norm(width, weight_D)


def _rotation(problem: QKRopeWriteProblem) -> rope.Rope | None:
    if problem.rotary_dim == 0:
        return None
    return rope.bind_reference(
        rope.RopeProblem(
            device=problem.device,
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            rotary_dim=problem.rotary_dim,
            layout=problem.layout,
        )
    )


def _sample(problem: QKRopeWriteProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    heads, kv_heads, head_dim = problem.heads, problem.kv_heads, problem.head_dim
    block_tokens, wide = problem.block_tokens, {**new, "dtype": torch.float32}
    qkv = random_tensor(3, (heads + 2 * kv_heads) * head_dim, **new)
    angles = 3 * torch.rand(11, problem.rotary_dim // 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(problem.device)
    weights: tuple[torch.Tensor | None, ...] = (None, None)
    if problem.eps is not None:
        weights = (random_tensor(head_dim, **wide), random_tensor(head_dim, **wide))
    positions = torch.tensor([10, 0, 4], device=problem.device)
    if problem.quantized:
        shape = (3, kv_heads, block_tokens, head_dim)
        kv = random_quantized_cache(
            shape, generator=generator, device=problem.device, form=problem.quantized
        )
    else:
        kv = random_tensor(3, 2, kv_heads, block_tokens, head_dim, **new)
    slot = torch.tensor(
        [block_tokens, 2 * block_tokens - 1, 3 * block_tokens - 1], device=problem.device
    )
    weights = (*weights, *kv_write.fixed_scales(problem, generator))
    return Sample(problem=problem, weights=weights, arguments=(qkv, positions, table, kv, slot))


def _outputs(sample: Sample) -> list[torch.Tensor]:
    """The queries, and what the cache means: quantized of values that lie between two may differ by
    one."""
    problem, (qkv_TC, _, _, kv, _) = sample.problem, sample.arguments
    if problem.quantized:
        kv = dequantize(kv, torch.float32, problem.quantized)
    return [qkv_TC, kv]


def _tolerance(problem: QKRopeWriteProblem) -> float:
    step = {
        None: 0.0,
        "int8": 1 / 127,
        "fp8": 1 / 16,
        "fp8_e5m2": 1 / 8,
        "int4": 1 / 7,
        "nvfp4": 1 / 3,
        "nvfp4-4over6": 1 / 3,
        "int4-rotated": 1 / 7,
        "int3-rotated": 1 / 3,
        "turboquant-4bit": 0.3,
        "turboquant-3bit": 0.6,
    }[problem.quantized]
    return float_tolerance(problem.dtype) + step


OP: Op[QKRopeWriteProblem] = Op(
    name="qk_rope_write",
    reference=Kernel(
        name="separate ops", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.qk_rope_write.native:KERNEL",
        "headrace.back.kernels.qk_rope_write.triton_qk_rope_write:KERNEL",
    ),
    sample=_sample,
    tolerance=_tolerance,
    outputs=_outputs,
)

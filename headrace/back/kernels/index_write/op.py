"""What a step leaves in the cache of an indexer's keys, and its rotated queries, in one pass
(DeepSeek-V3.2, "DeepSeek sparse attention").

`bind(problem, weight_I, bias_I)` returns `f(q_TJI, key_TI, positions_T, table_PR, keys, slot_T) ->
None`. T tokens, J heads of the indexer, I `dim`, R `rotary`. A key is normed (layer norm, float32
weight and bias), its R elements from `offset` on are rotated, and it goes into keys [num_blocks,
block_tokens, I] at slot_T (see kernels/kv_write). Those of each query head are rotated in place.
q and key may be strided; last dimensions are contiguous. The table and `layout` are those of
kernels/rope.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.layer_norm.op import LayerNormProblem, bind_norm
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.rope.op import RopeProblem
from headrace.back.kernels.rope.op import bind_reference as bind_rope

IndexWrite = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None
]


@dataclass(frozen=True, kw_only=True)
class IndexWriteProblem:
    """`dtype` is that of the queries, the keys and the cache."""

    device: str
    dtype: torch.dtype
    heads: int
    dim: int
    rotary: int
    block_tokens: int
    eps: float
    layout: str = "half"
    offset: int = 0


def check_operands(
    problem: IndexWriteProblem, q_TJI: torch.Tensor, key_TI: torch.Tensor, keys: torch.Tensor
) -> None:
    """Asserts shapes and dtypes."""
    assert q_TJI.shape[1:] == (problem.heads, problem.dim), q_TJI.shape
    assert key_TI.shape == (q_TJI.shape[0], problem.dim), key_TI.shape
    assert keys.shape[1:] == (problem.block_tokens, problem.dim), keys.shape
    tensors = (q_TJI, key_TI, keys)
    assert all(t.dtype == problem.dtype and t.stride(-1) == 1 for t in tensors)


def bind_reference(
    problem: IndexWriteProblem, weight_I: torch.Tensor, bias_I: torch.Tensor
) -> IndexWrite:
    """The reference: by the references of norm and rotation."""
    dim, facts = problem.dim, {"device": problem.device, "dtype": problem.dtype}
    of_norm = LayerNormProblem(**facts, width=dim, eps=problem.eps, bias=True)
    norm = bind_norm(of_norm, weight_I[None], bias_I)
    rotate = bind_rope(
        RopeProblem(
            **facts, head_dim=problem.rotary, rotary_dim=problem.rotary, layout=problem.layout
        )
    )

    def index_write(
        q_TJI: torch.Tensor,
        key_TI: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        keys: torch.Tensor,
        slot_T: torch.Tensor,
    ) -> None:
        check_operands(problem, q_TJI, key_TI, keys)
        normed_T1I = norm(key_TI)[:, None]
        rotated = slice(problem.offset, problem.offset + problem.rotary)
        rotate(q_TJI[..., rotated], normed_T1I[..., rotated], positions_T, table_PR)
        block_T = torch.div(slot_T, problem.block_tokens, rounding_mode="floor")
        keys[block_T, slot_T - block_T * problem.block_tokens] = normed_T1I[:, 0]

    return index_write


def _sample(problem: IndexWriteProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    dim, block = problem.dim, problem.block_tokens
    q = random_tensor(3, problem.heads, dim, **new)
    key = random_tensor(3, dim + 8, **new)[:, :dim]
    angles = 3 * torch.rand(11, problem.rotary // 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(problem.device)
    positions = torch.tensor([10, 0, 4], device=problem.device)
    slot = torch.tensor([block, 2 * block - 1, 3 * block - 1], device=problem.device)
    keys = random_tensor(3, block, dim, **new)
    weights = {**new, "dtype": torch.float32}
    return Sample(
        problem=problem,
        weights=(random_tensor(dim, **weights), random_tensor(dim, **weights)),
        arguments=(q, key, positions, table, keys, slot),
    )


OP: Op[IndexWriteProblem] = Op(
    name="index_write",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.index_write.native:KERNEL",
        "headrace.back.kernels.index_write.triton_index_write:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

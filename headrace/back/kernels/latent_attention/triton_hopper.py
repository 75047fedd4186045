"""When and how the kernels of triton_latent_hopper.py are launched: in steps that only decode.
Others are the kernel's of fixed order (triton_latent.py)."""

from __future__ import annotations

from typing import Any

import torch
import triton

from headrace.back.kernels.attention.op import Plan, check_lse
from headrace.back.kernels.attention.triton_lists import lists, row_bucket
from headrace.back.kernels.latent_attention import triton_latent
from headrace.back.kernels.latent_attention.op import (
    LatentAttentionFunction,
    LatentAttentionProblem,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.wrap import capability, interpreted, launch, num_sms

POSITIONS, STAGES = 64, 2
"""Of a tile, and how many tiles are in shared memory: 72 KiB each."""
MOST_HEADS = 32
"""Heads of a program: more would not fit its registers."""
FEW_ROWS = 8
MERGED = {True: (64, 64), False: (512, 8)}
"""Elements of a head that a program of the merge takes, and parts of a row that it reads at a time,
by whether there are fewer rows than FEW_ROWS, which have many parts."""


def bind(problem: LatentAttentionProblem) -> LatentAttentionFunction:
    """The kernels for one layer's heads."""
    heads, rank, width = problem.heads, problem.rank, problem.width
    others = triton_latent.bind(problem)
    share = min(MOST_HEADS, triton.next_power_of_2(max(8, heads)))
    shares = triton.cdiv(heads, share)

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, lse_TH: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_rows = len(plan.kv_len_R)
        if lse_TH is not None:
            check_lse(lse_TH, q_THW)
        if lse_TH is not None or plan.num_decodes < num_rows:
            return others(q_THW, kv, plan, lse_TH)
        assert q_THW.dtype == kv.dtype == problem.dtype, (q_THW.dtype, kv.dtype)
        assert q_THW.is_contiguous() and q_THW.shape[1:] == (heads, width), q_THW.shape
        table, device, bucket = plan.block_table_RB, q_THW.device, row_bucket(num_rows)
        assert table.stride(1) == 1 or table.shape[1] == 1
        runs, common = max(1, num_sms(device) // shares), launch(device)
        (untils, rows), _ = lists.get(
            plan, ("latent runs", runs), attention, lambda: _runs(plan, runs, bucket)
        )
        out_THC = q_THW.new_empty((q_THW.shape[0], heads, rank))
        size = shares * runs * 2 * share * (rank + 2)
        partial = torch.empty(size, dtype=torch.float32, device=device)
        latent, rotated, block_rows = _described(problem, kv)
        _decode_kernel()[(shares, runs)](
            latent, rotated, q_THW, out_THC, partial, untils, rows, plan.query_start_R1,
            plan.kv_len_R, table, table.stride(0), block_rows, problem.scale * 1.4426950408889634,
            HEADS=heads, Q=share, BLOCK_TOKENS=problem.block_tokens, STAGES=STAGES, ROWS=bucket,
            num_warps=4, **common,
        )  # fmt: skip
        merged, parts = MERGED[num_rows < FEW_ROWS]
        merged, by_run = min(merged, rank), num_rows >= runs
        _merge_kernel()[(runs - 1 if by_run else num_rows, heads, triton.cdiv(rank, merged))](
            partial, untils, rows, plan.query_start_R1, out_THC, HEADS=heads, Q=share, RANK=rank,
            C=rank, D=merged, RUNS=runs, ROWS=bucket, CHUNK=parts, BY_RUN=by_run, num_warps=4,
            **common,
        )  # fmt: skip
        return out_THC

    return attention


def _decode_kernel() -> Any:
    from headrace.back.kernels.latent_attention.triton_latent_hopper import latent_decode_kernel

    return latent_decode_kernel


def _merge_kernel() -> Any:
    from headrace.back.kernels.latent_attention.triton_latent_hopper import latent_merge_kernel

    return latent_merge_kernel


def _runs(plan: Plan, runs: int, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
    from headrace.back.kernels.latent_attention.triton_latent_hopper import latent_runs_kernel

    device, num_rows = plan.kv_len_R.device, len(plan.kv_len_R)
    numbers = torch.empty(runs + bucket + 1, dtype=torch.int32, device=device)
    rows, untils = numbers[:runs], numbers[runs:]
    latent_runs_kernel[(runs,)](
        plan.kv_len_R, untils, rows, num_rows, RUNS=runs, N=POSITIONS, ROWS=bucket, num_warps=4,
        **launch(device),
    )  # fmt: skip
    return untils, rows


def _described(problem: LatentAttentionProblem, kv: torch.Tensor) -> tuple[Any, Any, int]:
    """The TMA unit's descriptors of the cache as rows of both parts of a latent, a block at a time;
    and how many rows a block is behind the one before."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_blocks, block_tokens, width = kv.shape
    assert kv.stride()[1:] == (width, 1) and kv.stride(0) % width == 0, kv.stride()
    block_rows = kv.stride(0) // width
    rows = kv.as_strided(((num_blocks - 1) * block_rows + block_tokens, width), (width, 1))
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[kv.dtype]

    def described(part: torch.Tensor) -> TensorDescriptor:
        box = [block_tokens, part.shape[1]]
        layout = gl.NVMMASharedLayout.get_default_for(box, element)
        return TensorDescriptor(part, list(part.shape), [width, 1], box, layout)

    return described(rows[:, : problem.rank]), described(rows[:, problem.rank :]), block_rows


def _supports(problem: LatentAttentionProblem) -> str | None:
    if problem.device != "cuda" or interpreted() or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs only"
    if capability() != (9, 0):
        return "asks for the TMA unit and the matrix instructions of compute capability 9.0"
    if problem.quantized:
        return f"reads no quantized latents ({problem.quantized})"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {problem.dtype}"
    if problem.rank not in (256, 512) or problem.rotary not in (32, 64):
        return f"knows ranks of 256 and 512 with 32 or 64, not {problem.rank} with {problem.rotary}"
    if problem.block_tokens < 8 or POSITIONS % problem.block_tokens:
        return f"blocks of {problem.block_tokens} tokens do not fill tiles of {POSITIONS}"
    return None


KERNEL = Kernel(name="hopper", supports=_supports, bind=bind)

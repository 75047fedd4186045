"""When and how the kernel of triton_expanded.py is launched: from the list of tiles that
kernels/attention/triton_tiles.py makes."""

from __future__ import annotations

from typing import Any

import torch
import triton

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.attention.triton_lists import lists, row_bucket
from headrace.back.kernels.attention.triton_tiles import TILE_FIELDS, tiles_kernel
from headrace.back.kernels.expanded_attention.op import (
    MIN_QUERIES,
    ExpandedAttention,
    ExpandedAttentionProblem,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.wrap import capability, interpreted, launch, num_sms

QUERIES = 128
"""Of a tile: 64 for each of two groups of warps."""
POSITIONS, STAGES = 128, 2
"""Of a tile of keys, and how many tiles are in shared memory."""
HOST_PAIRS = 5_000_000
"""Prompts of DeepSeek-V2-Lite on an H200, ms to the first token, recorded with absorbed queries and
launched kernel by kernel with expanded latents: 1,024 tokens 21 and 57, 2,048 43 and 57 (both the
host's time), 4,096 109 and 45. By that the 50 ms of a host that is never ahead are worth 8 million
pairs, fewer where a step's other kernels take that long too."""


def bind(problem: ExpandedAttentionProblem) -> ExpandedAttention:
    """The kernel for one layer's heads."""
    from headrace.back.kernels.expanded_attention.triton_expanded import expanded_kernel

    heads, own, rotary = problem.heads, problem.own, problem.rotary

    def make(plan: Plan, most: int) -> torch.Tensor:
        device, num_rows = plan.kv_len_R.device, len(plan.kv_len_R)
        tile_list = torch.empty((most + 1) * TILE_FIELDS, dtype=torch.int32, device=device)
        tiles_kernel[(most,)](
            plan.query_start_R1, plan.kv_len_R, tile_list, num_rows, QUERIES=QUERIES,
            MIN_QUERIES=MIN_QUERIES, ROWS=row_bucket(num_rows), num_warps=4, **launch(device),
        )  # fmt: skip
        return tile_list

    def attention(
        q_THN: torch.Tensor,
        q_THR: torch.Tensor,
        key_HSN: torch.Tensor,
        rotated_SR: torch.Tensor,
        value_HSV: torch.Tensor,
        begin_R: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        num_tokens, num_positions = len(q_THN), len(rotated_SR)
        assert q_THN.shape[1:] == (heads, own) and q_THR.shape[1:] == (heads, rotary)
        assert key_HSN.shape == value_HSV.shape == (heads, num_positions, own), key_HSN.shape
        assert key_HSN.is_contiguous() and value_HSV.is_contiguous()
        most = triton.cdiv(num_tokens, QUERIES) + len(plan.kv_len_R)
        tile_list, _ = lists.get(plan, ("expanded", most), attention, lambda: make(plan, most))
        out_THV = q_THN.new_empty((num_tokens, heads, own))
        expanded_kernel[(num_sms(q_THN.device),)](
            _described(key_HSN.flatten(0, 1)), _described(rotated_SR),
            _described(value_HSV.flatten(0, 1)), q_THN, q_THR, out_THV, tile_list, begin_R,
            num_positions, *q_THN.stride()[:2], *q_THR.stride()[:2],
            problem.scale * 1.4426950408889634, HEADS=heads, STAGES=STAGES, num_warps=4,
        )  # fmt: skip
        return out_THV

    return attention


def _described(matrix: torch.Tensor) -> Any:
    """The TMA unit's descriptor of a matrix in tiles of POSITIONS rows."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    box = [POSITIONS, matrix.shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(box, element)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], box, layout)


def _supports(problem: ExpandedAttentionProblem) -> str | None:
    if problem.device != "cuda" or interpreted() or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs only"
    if capability() != (9, 0):
        return "asks for the TMA unit and the matrix instructions of compute capability 9.0"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {problem.dtype}"
    if problem.own not in (64, 128) or problem.rotary not in (32, 64):
        return f"knows heads of 64 and 128 with 32 or 64, not {problem.own} with {problem.rotary}"
    if problem.values != problem.own:
        return f"values of {problem.values} are not as long as a head's own {problem.own}"
    return None


KERNEL = Kernel(name="hopper", supports=_supports, bind=bind, host_pairs=HOST_PAIRS)

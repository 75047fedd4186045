"""Norm, rotation and KV write by the native kernel: one pass over the merged projection."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.qk_rope_write.op import QKRopeWrite, QKRopeWriteProblem

MAX_HEAD_DIM = 512
_ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 12, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: QKRopeWriteProblem,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
) -> QKRopeWrite:
    """The kernel of one library; keeps the weights."""
    kernel = library.bind("qk_rope_write", *_ARGUMENTS)
    heads, kv_heads, head_dim = problem.heads, problem.kv_heads, problem.head_dim
    rotary, element, pairs = (
        problem.rotary_dim,
        DTYPES[problem.dtype],
        int(problem.layout == "pairs"),
    )
    q_weight, k_weight = (_checked(problem, weight) for weight in (q_weight_D, k_weight_D))
    eps, columns = problem.eps or 0.0, (heads + 2 * kv_heads) * head_dim

    def qk_rope_write(
        qkv_TC: torch.Tensor, positions_T: torch.Tensor, table_PR: torch.Tensor,
        kv: torch.Tensor, slot_T: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        tokens = qkv_TC.shape[0]
        assert qkv_TC.dtype == kv.dtype == problem.dtype and qkv_TC.shape[1] == columns
        assert qkv_TC.stride(1) == 1 and kv.stride()[3:] == (head_dim, 1), kv.stride()
        assert all(t.dtype == torch.int64 and t.is_contiguous() for t in (positions_T, slot_T))
        assert positions_T.shape[0] == slot_T.shape[0] == tokens
        assert rotary == 0 or (table_PR.shape[1] == rotary and table_PR.is_contiguous())
        kernel(
            qkv_TC.data_ptr(), positions_T.data_ptr(), table_PR.data_ptr(), kv.data_ptr(),
            slot_T.data_ptr(),
            *(None if weight is None else weight.data_ptr() for weight in (q_weight, k_weight)),
            tokens, qkv_TC.stride(0), heads, kv_heads, head_dim, rotary,
            table_PR.shape[0] if rotary else 0, kv.shape[3], kv.shape[0], kv.stride(0),
            kv.stride(1), kv.stride(2), eps, pairs, element,
        )  # fmt: skip
        return qkv_TC[:, : heads * head_dim].view(tokens, heads, head_dim)

    return qk_rope_write


def _checked(problem: QKRopeWriteProblem, weight_D: torch.Tensor | None) -> torch.Tensor | None:
    if problem.eps is None or weight_D is None:
        return None
    assert weight_D.dtype == torch.float32 and weight_D.shape == (problem.head_dim,)
    return weight_D.contiguous()


def _supports(problem: QKRopeWriteProblem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}"
    if problem.layout not in ("half", "pairs"):
        return f"knows the layouts half and pairs, not {problem.layout}"
    if problem.quantized:
        return "writes no quantized caches"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)

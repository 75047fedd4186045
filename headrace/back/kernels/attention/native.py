"""Paged attention by the native kernel: decode and prefill rows in one call, no gathered copy of
the KV.

`WHOLE` never cuts a row's KV into parts, as `KERNEL` does for long decode rows: slower where there
are more threads than heads, but a decode's result is then that of the same position in any chunk of
a prompt.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import (
    AttentionFunction,
    AttentionProblem,
    Plan,
    check_bias,
    check_lse,
    check_states,
)
from headrace.back.kernels.kv_write.native import QUANTIZATION_IDS
from headrace.back.kernels.kv_write.quantized import SCALE_BYTES, unfit, value_bytes
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

MAX_HEAD_DIM = 256
_ARGUMENTS = (*(POINTER,) * 11, *(INT64,) * 16, FLOAT, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None = None,
    bias_HW: torch.Tensor | None = None,
    *,
    whole: bool = False,
) -> AttentionFunction:
    """The kernel of one library; keeps the sinks, the slopes and the position bias."""
    assert problem.sinks == (sinks_H is not None), problem
    sinks = None if sinks_H is None else sinks_H.float().contiguous()
    assert sinks is None or sinks.shape == (problem.heads,), sinks.shape
    slopes = problem.slopes_tensor()
    bias = None if bias_HW is None else bias_HW.float().contiguous()
    check_bias(problem, bias)
    if bias is not None and problem.bias_rank:
        bias = bias.flip(1).contiguous()  # read in the order of keys
    kernel = library.bind("attention", *_ARGUMENTS)
    heads, head_dim, element = problem.heads, problem.head_dim, DTYPES[problem.dtype]
    window, scale, softcap = problem.reach, problem.scale, problem.softcap or 0.0

    form = QUANTIZATION_IDS[problem.quantized]
    mode = form % 4 + 16 * (form // 4) + 4 * whole + 8 * (not problem.causal)
    cache_dtype = torch.int8 if problem.quantized else problem.dtype
    width = head_dim
    if problem.quantized:
        width = value_bytes(head_dim, problem.quantized) + SCALE_BYTES

    def attention(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        lse_TH: torch.Tensor | None = None,
        states_THR: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if problem.bias_rank or states_THR is not None:
            check_states(problem, states_THR, q_THD)
        if lse_TH is not None:
            check_lse(lse_TH, q_THD)
        assert q_THD.dtype == problem.dtype and kv.dtype == cache_dtype, (q_THD.dtype, kv.dtype)
        num_blocks, _, kv_heads, block_tokens, _ = kv.shape
        assert kv.stride()[3:] == (width, 1) and q_THD.stride(2) == 1, (kv.stride(),)
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
        out_THD = q_THD.new_empty(q_THD.shape)
        assert plan.max_kv_len <= table.shape[1] * block_tokens, (plan.max_kv_len, table.shape)
        num_tokens, rows = q_THD.shape[0], lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == rows, (starts.shape, table.shape)
        # Padding is left as it is where the host does not know how much there is: a row of it
        # reaches no other.
        if plan.host_query_start is not None:
            computed = int(plan.host_query_start[rows])
            if computed < num_tokens:
                out_THD[computed:] = 0
        kernel(
            *(tensor.data_ptr() for tensor in (q_THD, kv, out_THD, starts, lengths, table)),
            sinks.data_ptr() if sinks is not None else None,
            slopes.data_ptr() if slopes is not None else None,
            bias.data_ptr() if bias is not None else None,
            states_THR.data_ptr() if states_THR is not None else None,
            lse_TH.data_ptr() if lse_TH is not None else None,
            problem.bias_width, problem.bias_rank,
            rows, table.stride(0), num_tokens, num_blocks, heads, kv_heads, head_dim, block_tokens,
            *q_THD.stride()[:2], *kv.stride()[:3], window, scale, softcap, element,
            mode,
        )  # fmt: skip
        return out_THD

    return attention


def _supports(problem: AttentionProblem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}"
    if problem.heads % problem.kv_heads:
        return f"{problem.heads} heads are no multiple of {problem.kv_heads} KV heads"
    if problem.late_length or problem.stripes:
        return "knows neither scores that grow nor sparse blocks"
    if reason := unfit(problem.quantized, problem.head_dim):
        return reason
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
)
WHOLE = Kernel(
    name="native whole",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights, whole=True),
    invariant=True,
)

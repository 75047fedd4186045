"""Attention over latents by the native kernel of paged attention (kernels/attention): keys of one
KV head, and their beginnings as values. `WHOLE` never cuts a row's positions into splits, so that
a decode's bits are those of the same position in any chunk of a prompt."""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.op import Plan, check_lse
from headrace.back.kernels.latent_attention.op import (
    LatentAttentionFunction,
    LatentAttentionProblem,
)
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

MAX_WIDTH = 640
WHOLE_ROWS = 4
_ARGUMENTS = (*(POINTER,) * 7, *(INT64,) * 9, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary, problem: LatentAttentionProblem, *, whole: bool = False
) -> LatentAttentionFunction:
    """The kernel of one library."""
    kernel = library.bind("latent_attention", *_ARGUMENTS)
    heads, rank, width, element = problem.heads, problem.rank, problem.width, DTYPES[problem.dtype]
    mode = WHOLE_ROWS if whole else 0

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, lse_TH: torch.Tensor | None = None
    ) -> torch.Tensor:
        if lse_TH is not None:
            check_lse(lse_TH, q_THW)
        assert q_THW.dtype == kv.dtype == problem.dtype, (q_THW.dtype, kv.dtype)
        assert q_THW.is_contiguous() and q_THW.shape[1:] == (heads, width), q_THW.shape
        num_blocks, block_tokens, _ = kv.shape
        assert kv.stride()[1:] == (width, 1), kv.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
        num_tokens, rows = q_THW.shape[0], lengths.shape[0]
        assert starts.shape[0] == rows + 1 and table.shape[0] == rows, (starts.shape, table.shape)
        out_THC = q_THW.new_empty((num_tokens, heads, rank))
        # Padding is left as it is where the host does not know how much there is.
        if plan.host_query_start is not None:
            computed = int(plan.host_query_start[rows])
            if computed < num_tokens:
                out_THC[computed:] = 0
        kernel(
            *(tensor.data_ptr() for tensor in (q_THW, kv, out_THC, starts, lengths, table)),
            lse_TH.data_ptr() if lse_TH is not None else None,
            rows, table.stride(0), num_tokens, num_blocks, heads, width, rank, block_tokens,
            kv.stride(0), problem.scale, element, mode,
        )  # fmt: skip
        return out_THC

    return attention


def _supports(problem: LatentAttentionProblem) -> str | None:
    if problem.width > MAX_WIDTH:
        return f"latents of {problem.width} are above {MAX_WIDTH}"
    if problem.quantized:
        return f"reads no quantized latents ({problem.quantized})"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native", supports=_supports, bind=lambda problem: bind_with(loaded(), problem)
)
WHOLE = Kernel(
    name="native whole",
    supports=_supports,
    bind=lambda problem: bind_with(loaded(), problem, whole=True),
    invariant=True,
)

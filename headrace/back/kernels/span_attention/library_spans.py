"""Attention inside spans by PyTorch's own kernels for GPUs: FlashAttention 2 over packed spans, and
cuDNN's over spans of one length; and `LONG`, which takes ours for short spans and these for long
ones. cuDNN makes a plan for each length (60 ms on an H200), which pays where a length comes again;
until then it is FlashAttention 2.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from headrace.back.kernels.launches import are_launched
from headrace.back.kernels.op import Kernel, float_tolerance
from headrace.back.kernels.span_attention import triton_spans
from headrace.back.kernels.span_attention.op import SpanAttention, SpanAttentionProblem
from headrace.back.kernels.upload import held, to_device

log = logging.getLogger(__name__)
KEPT_LISTS = 8
LONG_SPAN = 1500
"""Tokens of a span from which on the library's kernels are quicker than ours, and a plan is worth
making for a length that has come before; a window of Whisper's has so many."""
PLANNED_AT_ONCE = 12_288
"""From which on one pass of an encoder gains more than a plan costs."""
MOST_LENGTHS = 512
"""That a layer remembers."""
UNIT = 8
"""Heads are multiples of it."""


def bind_flash(problem: SpanAttentionProblem) -> SpanAttention:
    """FlashAttention 2, whatever lengths spans have."""

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        bounds = held(_bounds(tuple(starts), q_THD.device))
        longest = max((end - begin for begin, end in pairwise(starts)), default=0)
        if not longest:
            return torch.empty_like(q_THD)
        y_THD: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_TKD,
            v_TKD,
            bounds,
            bounds,
            longest,
            longest,
            0.0,
            False,
            False,
            scale=problem.scale,
        )[0]
        return y_THD

    return attend


def bind_cudnn(problem: SpanAttentionProblem) -> SpanAttention:
    """cuDNN's, once for each length that spans have in a row."""

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        parts = []
        for begin, end, length in runs_of(starts):
            spans = [
                each[begin:end].unflatten(0, (-1, length)).transpose(1, 2)
                for each in (q_THD, k_TKD, v_TKD)
            ]
            y_SHTD = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *spans, None, False, 0.0, False, False, scale=problem.scale
            )[0]
            parts.append(y_SHTD.transpose(1, 2).flatten(0, 1))
        if not parts:
            return torch.empty_like(q_THD)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attend


def bind_long(problem: SpanAttentionProblem) -> SpanAttention:
    """See the top of the file. A library's first result is compared with ours, and of a kernel that
    is off nothing is taken; so are plans made while nothing is recorded."""
    ours, flash, cudnn = triton_spans.bind(problem), bind_flash(problem), bind_cudnn(problem)
    known = _known(problem)
    seen: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        inputs = (q_THD, k_TKD, v_TKD, starts)
        if len(starts) < 2 or starts[1] - starts[0] < LONG_SPAN or not are_launched():
            return ours(*inputs)
        sizes = tuple(end - begin for begin, end in pairwise(starts))
        came, one_length = sizes in seen, len(set(sizes)) == 1
        seen[sizes] = None
        if len(seen) > MOST_LENGTHS:
            seen.popitem(last=False)
        planned = one_length and (came or sizes[0] >= PLANNED_AT_ONCE)
        wanted = sizes if planned else ()
        library = cudnn if wanted else flash
        if wanted not in known and not _is_recorded(q_THD):
            y_THD = ours(*inputs)
            known[wanted] = _agrees(problem, y_THD, library(*inputs))
            return y_THD
        if known.get(wanted):
            return library(*inputs)
        return flash(*inputs) if known.get(()) else ours(*inputs)

    return attend


@lru_cache
def _known(problem: SpanAttentionProblem) -> dict[tuple[int, ...], bool]:
    """Lengths of spans -> whether cuDNN's is trusted with them; (): FlashAttention. Of all layers
    of a kind."""
    return {}


def _is_recorded(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _agrees(problem: SpanAttentionProblem, y_THD: torch.Tensor, library_THD: torch.Tensor) -> bool:
    off = (library_THD.float() - y_THD.float()).abs().max() / y_THD.float().abs().max()
    if off <= float_tolerance(problem.dtype):
        return True
    log.warning("a library's attention inside spans is off by %.3g and is not taken", off)
    return False


def runs_of(starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Spans of one length in a row: where they begin and end, and the length; empty ones are left
    out."""
    runs: list[tuple[int, int, int]] = []
    for begin, end in pairwise(starts):
        length = end - begin
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], end, length)
        elif length:
            runs.append((begin, end, length))
    return runs


@lru_cache(maxsize=KEPT_LISTS)
def _bounds(starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return to_device(np.array(starts, np.int32), device)


def _supports(problem: SpanAttentionProblem) -> str | None:
    if problem.device != "cuda" or torch.version.hip is not None:
        return "is for NVIDIA's GPUs"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"knows 16-bit floats, not {problem.dtype}"
    if problem.softcap is not None or problem.window is not None or problem.bias_reach:
        return "knows no windows, soft caps and position biases"
    if problem.kv_heads != problem.heads:
        return "takes as many heads of keys as of queries"
    if problem.head_dim % UNIT or problem.head_dim > 128:
        return f"takes heads of multiples of {UNIT} to 128, not {problem.head_dim}"
    return None


FLASH = Kernel(name="flash", supports=_supports, bind=bind_flash)
CUDNN = Kernel(name="cudnn", supports=_supports, bind=bind_cudnn)
LONG = Kernel(
    name="triton, long spans by cuDNN",
    supports=lambda problem: _supports(problem) or triton_spans.KERNEL.supports(problem),
    bind=bind_long,
)

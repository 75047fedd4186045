"""Device functions that kernels of several ops call."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter(DEPENDENT: tl.constexpr):
    """Lets the next kernel start, and waits until the one before has written its results."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def enter_late(DEPENDENT: tl.constexpr):
    """The same, but lets the next kernel start only after the wait: it may then read, before it
    waits itself, whatever was written before the kernel that calls this."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ordered(b_x):
    """float32 to int32 of the same order; -0 equals +0, a NaN is beyond the infinity of its
    sign."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def prefetch(p_lines):
    """Asks for the lines of 128 bytes at these pointers, into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_lines.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip

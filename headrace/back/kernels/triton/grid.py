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

"""What Gluon calls by another name from version to version, and what its kernels share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

try:
    from triton.experimental.gluon.language import thread_barrier
except ImportError:  # Triton 3.7 calls it so
    from triton.experimental.gluon.language import barrier as thread_barrier

__all__ = ["enter", "enter_late", "thread_barrier"]


@gluon.jit
def enter(DEPENDENT: gl.constexpr):
    """Lets the next kernel start, and waits until the one before has written its results
    (grid.py)."""
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def enter_late(DEPENDENT: gl.constexpr):
    """The same, but lets the next kernel start only after the wait (grid.py)."""
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip

"""What Gluon calls by another name from version to version."""

from __future__ import annotations

try:
    from triton.experimental.gluon.language import thread_barrier
except ImportError:  # Triton 3.7 calls it so
    from triton.experimental.gluon.language import barrier as thread_barrier

__all__ = ["thread_barrier"]

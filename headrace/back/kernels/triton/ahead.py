"""Compiling many kernels at once: a cold start would otherwise compile them one by one, as they are met."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

MOST_THREADS = 16


@contextmanager
def compiling() -> Iterator[None]:
    """Within it Triton kernels are compiled, beside each other, and none is launched: what they would have written
    holds whatever it held. On leaving, all are compiled; the first launch of each loads it."""
    run = JITFunction.run

    def compile_only(
        self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool):
        JITFunction.run = compile_only  # type: ignore[method-assign]
        try:
            yield
        finally:
            JITFunction.run = run  # type: ignore[method-assign]

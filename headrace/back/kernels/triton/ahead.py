"""Compiling many kernels at once: a cold start would otherwise compile them one by one, as they are
met."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

from headrace.back.kernels.launches import without_launches
from headrace.back.kernels.triton.compiler import job_of
from headrace.back.kernels.triton.compilers import Compilers, running
from headrace.back.platforms.device_threads import device_pool

log = logging.getLogger(__name__)

MOST_THREADS = 16


@contextmanager
def compiling() -> Iterator[None]:
    """Within it Triton kernels are compiled, beside each other, and none is launched: what they
    would have written holds zeros (launches.py). On leaving, all are compiled and loaded."""
    run, elsewhere = JITFunction.run, running()
    asked: dict[JITFunction[Any], Callable[..., Any]] = {}

    def compile_only(
        self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> Any:
        if elsewhere is not None and self not in asked:
            assert self.device_caches[torch.cuda.current_device()]  # made by asking, and `compile`
            asked[self] = self.compile
            self.compile = _first(elsewhere, self.compile)
        return run(self, *args, grid=grid, warmup=True, **options)

    threads = min(MOST_THREADS, os.cpu_count() or 1)
    try:
        with (
            without_launches(),
            device_pool(threads, "compile") as pool,
            _Loading(pool, ignore_errors=True),
            _replaced(JITFunction, "run", compile_only),
        ):
            yield
    finally:
        for function, compile_here in asked.items():
            function.compile = compile_here


@contextmanager
def _replaced(owner: object, name: str, instead: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _first(elsewhere: Compilers, compile_here: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles in another process first, whose result is then found in the cache."""

    def compiled(source: Any, *, target: Any, options: dict[str, Any], **more: Any) -> Any:
        try:
            elsewhere.compile(job_of(source, target, options))
        except TypeError:  # a constant that JSON cannot say
            log.debug("%s is compiled in this process", source.name)
        return compile_here(source, target=target, options=options, **more)

    return compiled


class _Loading(AsyncCompileMode):
    """Has each kernel asked for once, and loaded by the thread that compiles it: its launcher is a
    C module that has to be compiled as well (H200, 8B: 76 of them one by one took 7 of 28 s)."""

    def submit(
        self,
        key: Hashable,
        compile_fn: Callable[[], Any],
        finalize_fn: Callable[[FutureKernel], None],
    ) -> FutureKernel:
        """The kernel to come, which later launches find where they look for it."""

        def loaded() -> Any:
            kernel = compile_fn()
            assert kernel.run is not None
            return kernel

        kernel: FutureKernel = super().submit(key, loaded, finalize_fn)
        finalize_fn(kernel)
        return kernel

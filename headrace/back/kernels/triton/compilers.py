"""Processes that compile Triton kernels into the cache folder, for a start that finds it empty.

Most of a kernel's compilation holds the interpreter's lock, so that threads beside each other share
one core (H200 with 16 cores: 76 kernels took 12 s). Processes have to import torch and Triton
first; `expect` starts them before this process imports these itself. It imports neither. A kernel
that no process can compile is compiled here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from headrace.back.platforms.cpu import usable_cores
from headrace.base import env
from headrace.base.pipe_process import PipeProcess

log = logging.getLogger(__name__)

MOST = 12
LATE_S = 60.0
"""After so long a process is given up."""
FOLDER = "triton"
"""Where compiled kernels are kept, in the cache folder."""


class Compilers:
    """The processes. `compile` is called from as many threads as there are processes, or more."""

    def __init__(self, count: int) -> None:
        self._idle: SimpleQueue[PipeProcess | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(PipeProcess("-m", "headrace.back.kernels.triton.compiler"))

    def compile(self, job: dict[str, Any]) -> bool:
        """Has one kernel compiled into the cache; False if that failed. TypeError if JSON cannot
        say it."""
        line = json.dumps(job).encode() + b"\n"
        child = self._idle.get()
        if child is None:  # in the place of one that is gone
            self._idle.put(None)
            return False
        try:
            child.write(line)
            done = child.read(1, time.monotonic() + LATE_S) == b"+"
        except (OSError, EOFError, TimeoutError):
            log.warning("a process that compiles kernels has ended or hangs; this one compiles")
            child.close()
            self._idle.put(None)
            return False
        self._idle.put(child)
        return done

    def close(self) -> None:
        """Ends them."""
        while not self._idle.empty():
            child = self._idle.get()
            if child is not None:
                child.close()
        self._idle.put(None)


_compilers: list[Compilers] = []


@contextmanager
def expected(device: str) -> Iterator[None]:
    """Within it a model is loaded and made ready on a device: on GPUs there are processes that
    compile, if there is nothing in the cache."""
    count = min(MOST, usable_cores() - 2)
    if device != "cuda" or count < 2 or (env.cache_dir() / FOLDER).exists():
        yield
        return
    _compilers.append(Compilers(count))
    try:
        yield
    finally:
        _compilers.pop().close()


def running() -> Compilers | None:
    """The processes, while there are any."""
    return _compilers[-1] if _compilers else None

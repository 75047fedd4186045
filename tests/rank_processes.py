"""Ranks of a parallel model as processes, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from headrace.base import env

ENTRY = """
import gc, importlib, os, runpy, signal, sys
gc.disable()
module, ranks, *arguments = sys.argv[1:]
importlib.import_module(module)
del sys.modules[module]
running = set()
for rank in range(int(ranks)):
    if pid := os.fork():
        running.add(pid)
        continue
    sys.argv = [module, str(rank), ranks, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    os._exit(0)
while running:
    pid, status = os.wait()
    running.discard(pid)
    if status:
        for one in running:
            os.kill(one, signal.SIGKILL)
        sys.exit(f"a rank ended with status {status}")
"""
"""Imports once and forks: importing takes longer than what most ranks do. A rank ends soon: its garbage is not looked
for, among hundreds of thousands of objects that its imports leave."""


def run_ranks(module: str, ranks: int, *arguments: object) -> None:
    """`python -m module RANK RANKS ARGUMENTS` for each rank; all must end with status 0. One that fails ends the
    others, which would wait for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, module, str(ranks), *map(str, arguments)],
        env=env.child_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
        start_new_session=True,
    )
    try:
        assert process.wait() == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

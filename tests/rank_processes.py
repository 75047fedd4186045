"""Ranks of a parallel model as processes, for tests."""

from __future__ import annotations

import subprocess
import sys
import time

from headrace.base import env

ENTRY = """
import gc, runpy, sys
gc.disable()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""A rank ends soon: its garbage is not looked for, among hundreds of thousands of objects that its imports leave."""


def run_ranks(module: str, ranks: int, *arguments: object) -> None:
    """`python -m module RANK RANKS ARGUMENTS` for each rank; all must end with status 0. One that fails ends the
    others, which would wait for it."""
    environment = env.child_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    command = [sys.executable, "-c", ENTRY, module]
    more = [str(ranks), *map(str, arguments)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            processes.append(subprocess.Popen([*command, str(rank), *more], env=environment))
        while None in (codes := [one.poll() for one in processes]) and not any(codes):
            time.sleep(0.02)
        assert codes == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()

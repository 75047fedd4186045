"""Ranks of a parallel model as processes, for tests."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys

from headrace.base import env

ENTRY = """
import gc, importlib, json, os, runpy, signal, sys
gc.disable()
for line in sys.stdin:
    module, ranks, *arguments = json.loads(line)
    importlib.import_module(module)
    del sys.modules[module]
    running = set()
    for rank in range(ranks):
        if pid := os.fork():
            running.add(pid)
            continue
        os.dup2(2, 1)
        sys.argv = [module, str(rank), str(ranks), *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        os._exit(0)
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not failed:
            failed = status
            for one in running:
                os.kill(one, signal.SIGKILL)
    print(failed, flush=True)
"""
"""Imports once and forks: importing takes longer than what most ranks do. A rank ends soon: its garbage is not looked
for, among hundreds of thousands of objects that its imports leave. It stays for the next ranks of this process."""
_parents: list[subprocess.Popen[str]] = []


def run_ranks(module: str, ranks: int, *arguments: object) -> None:
    """`python -m module RANK RANKS ARGUMENTS` for each rank; all must end with status 0. One that fails ends the
    others, which would wait for it."""
    if not _parents:
        _parents.append(
            subprocess.Popen(
                [sys.executable, "-c", ENTRY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env.child_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
                start_new_session=True,
            )
        )
        atexit.register(_end)
    (parent,) = _parents
    assert parent.stdin is not None and parent.stdout is not None
    told = ""
    try:
        parent.stdin.write(json.dumps([module, ranks, *map(str, arguments)]) + "\n")
        parent.stdin.flush()
        told = parent.stdout.readline()
    finally:
        if not told:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
            _parents.clear()
    assert told == "0\n", f"a rank ended with status {told or 'none'}"


def _end() -> None:
    """With this process: there is nothing more to read for it."""
    for parent in _parents:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.close()
        parent.wait()
        parent.stdout.close()
    _parents.clear()
